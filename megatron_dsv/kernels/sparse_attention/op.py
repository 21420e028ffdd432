"""The custom ops ``megatron_dsv::sparse_attention_forward`` and ``_backward``: opaque to torch.compile, with autograd.

Where nothing traces, ``attend``, ``run_forward`` and ``run_backward`` reach the same code without them: the wrapping of
an op takes the host longer than a short sequence's kernels take the device.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim. A selection travels flat: its tensors, its key-major twin's tensors (or None), and its sizes
[num_queries, num_keys, q_block_size, kv_block_size, max_row_count, entries_bound].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from megatron_dsv.kernels.attention_layout import lse_dtype
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import cudnn, flash4, reference
from megatron_dsv.kernels.sparse_attention.choice import check_limits, choose

_SELECTION = ("Tensor kv_indices, Tensor row_start, Tensor row_count, Tensor kv_length, Tensor? twin_indices, "
              "Tensor? twin_start, Tensor? twin_count, SymInt[] sizes")


def flatten(selection: KVSelection) -> tuple:
    """The selection as the eight arguments of the ops."""
    twin = selection.transposed
    twin_tensors = (None, None, None) if twin is None else (twin.kv_indices, twin.row_start, twin.row_count)
    sizes = [selection.num_queries, selection.num_keys, selection.q_block_size, selection.kv_block_size,
             selection.max_row_count, selection.entries_bound]
    return (selection.kv_indices, selection.row_start, selection.row_count, selection.kv_length, *twin_tensors, sizes)


def unflatten(kv_indices: Tensor, row_start: Tensor, row_count: Tensor, kv_length: Tensor, twin_indices: Tensor | None,
              twin_start: Tensor | None, twin_count: Tensor | None, sizes: list[int]) -> KVSelection:
    """The inverse of ``flatten``."""
    num_queries, num_keys, q_block_size, kv_block_size, max_row_count, max_entries = sizes
    selection = KVSelection(
        kv_indices=kv_indices, row_start=row_start, row_count=row_count, kv_length=kv_length, num_queries=num_queries,
        num_keys=num_keys, q_block_size=q_block_size, kv_block_size=kv_block_size, max_row_count=max_row_count,
        max_entries=max_entries)
    if twin_indices is None or twin_start is None or twin_count is None:
        return selection
    twin = replace(selection, kv_indices=twin_indices, row_start=twin_start, row_count=twin_count,
                   max_row_count=selection.num_query_groups)
    return replace(selection, transposed=twin)


def _forward(q, k, v, kv_indices, row_start, row_count, kv_length, twin_indices, twin_start, twin_count,
             sizes, softmax_scale, backend, deterministic):
    """out [s, b, h, d] and lse [b, h, s]; ``deterministic`` limits the backends, here as in the backward."""
    selection = unflatten(kv_indices, row_start, row_count, kv_length, twin_indices, twin_start, twin_count, sizes)
    match _resolve(backend, "forward", q, k, v, selection, deterministic):
        case "reference":
            return reference.forward(q, k, v, selection, softmax_scale=softmax_scale)
        case "triton":
            from megatron_dsv.kernels.sparse_attention.triton import launch
            return launch.forward(q, k, v, selection, softmax_scale=softmax_scale)
        case "flash4":
            return flash4.forward(q, k, v, selection, softmax_scale=softmax_scale)
        case "cudnn":
            return cudnn.forward(q, k, v, selection, softmax_scale=softmax_scale)


sparse_attention_forward = torch.library.custom_op(
    "megatron_dsv::sparse_attention_forward", _forward, mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SELECTION}, float softmax_scale, str backend, bool deterministic) "
           "-> (Tensor, Tensor)")


@sparse_attention_forward.register_fake
def _(q, k, v, kv_indices, row_start, row_count, kv_length, twin_indices, twin_start, twin_count, sizes, softmax_scale,
      backend, deterministic):
    s, b, h, d = q.shape
    return q.new_empty((s, b, h, d)), q.new_empty((b, h, s), dtype=lse_dtype(q))


def _backward(dout, q, k, v, out, lse, kv_indices, row_start, row_count, kv_length, twin_indices,
              twin_start, twin_count, sizes, softmax_scale, backend, deterministic):
    """dq [s, b, h, d], dk and dv [sk, b, G, d]."""
    selection = unflatten(kv_indices, row_start, row_count, kv_length, twin_indices, twin_start, twin_count, sizes)
    match _resolve(backend, "backward", q, k, v, selection, deterministic):
        case "reference":
            return reference.backward(dout, q, k, v, out, lse, selection, softmax_scale=softmax_scale)
        case "triton":
            from megatron_dsv.kernels.sparse_attention.triton import launch
            return launch.backward(dout, q, k, v, out, lse, selection, softmax_scale=softmax_scale,
                                   deterministic=deterministic)
        case "flash4":
            return flash4.backward(dout, q, k, v, out, lse, selection, softmax_scale=softmax_scale)
        case "cudnn":
            return cudnn.backward(dout, q, k, v, out, lse, selection, softmax_scale=softmax_scale)


sparse_attention_backward = torch.library.custom_op(
    "megatron_dsv::sparse_attention_backward", _backward, mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SELECTION}, float softmax_scale, "
           "str backend, bool deterministic) -> (Tensor, Tensor, Tensor)")


@sparse_attention_backward.register_fake
def _(dout, q, k, v, out, lse, kv_indices, row_start, row_count, kv_length, twin_indices, twin_start, twin_count, sizes,
      softmax_scale, backend, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *selection, sizes, softmax_scale, backend, deterministic = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    # Nobody reads a gradient by lse.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *selection)
    ctx.options = (sizes, softmax_scale, backend, deterministic)


def _gradients(backward: Callable[..., Any], ctx, dout: Tensor | None):
    q, k, v, out, lse, *selection = ctx.saved_tensors
    if dout is None:
        return (None,) * (3 + len(selection) + len(ctx.options))
    # Autograd may hand over an expanded gradient, whose last stride is 0.
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    grads = backward(dout, q, k, v, out, lse, *selection, *ctx.options)
    return (*grads, *(None for _ in selection), *(None for _ in ctx.options))


sparse_attention_forward.register_autograd(
    lambda ctx, dout, _dlse: _gradients(sparse_attention_backward, ctx, dout), setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The two ops' autograd without the ops."""

    @staticmethod
    def forward(ctx, *inputs):
        # A ``setup_context`` apart would have every call bind a signature.
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        return _gradients(_backward, ctx, dout)


def attend(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``sparse_attention_forward``, differentiable."""
    return _Attention.apply(q, *arguments) if _untraced(q) else sparse_attention_forward(q, *arguments)


def run_forward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``sparse_attention_forward``, without autograd."""
    return (_forward if _untraced(q) else sparse_attention_forward)(q, *arguments)


def run_backward(dout: Tensor, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``sparse_attention_backward``."""
    return (_backward if _untraced(q) else sparse_attention_backward)(dout, q, *arguments)


def _untraced(q: Tensor) -> bool:
    """Whether q is plain data, and neither torch.compile nor a dispatch mode watches for ops."""
    return (not torch.compiler.is_compiling() and type(q) in (Tensor, torch.nn.Parameter) and not q.is_meta
            and not is_in_torch_dispatch_mode())


def _resolve(backend: str, pass_name: str, q: Tensor, k: Tensor, v: Tensor, selection: KVSelection,
             deterministic: bool) -> str:
    if backend == "auto":
        return choose(pass_name, q, k, v, selection, deterministic)
    check_limits(backend, q, k, v, selection, deterministic)
    return backend
