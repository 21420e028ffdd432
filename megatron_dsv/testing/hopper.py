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

    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    signature, constants, attributes = {}, dict(launched.constants), {}
    for position, name in enumerate(launched.kernel.arg_names):
        value = launched.arguments.get(name)
        if name in launched.constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
        elif isinstance(value, torch.Tensor):
            signature[name] = names[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value != 1 and value % 16 == 0):
            attributes[position,] = [["tt.divisibility", 16]]
    source = ASTSource(launched.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": launched.tile.num_warps, "num_stages": launched.tile.num_stages})
