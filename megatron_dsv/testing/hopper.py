"""Compiling a kernel launch for Hopper on a host without a GPU."""

from __future__ import annotations

from typing import Any

import torch

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes that one thread block may use."""


def compile_for_hopper(launched: Any) -> Any:
    """The compiled kernel (``.metadata.shared`` bytes, ``.asm["ptx"]``) of a Launch over meta tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = dict(launched.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(launched.kernel.arg_names):
        if name in launched.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = _type(launched.arguments[name], (position,), constants, attributes)
    source_type = GluonASTSource if launched.kernel.is_gluon() else ASTSource
    source = source_type(launched.kernel, signature, constexprs=constants, attrs=attributes)
    tile = launched.tile
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers})


def _type(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[tuple[int, ...], Any]) -> Any:
    """The type of an argument as triton spells it, specialized as at a launch: 1 and None are constants."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
             torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
    if isinstance(value, tuple):
        fields = [_type(item, (*path, i), constants, attributes) for i, item in enumerate(value)]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{names[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{names[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, torch.Tensor):
        return "*" + names[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
