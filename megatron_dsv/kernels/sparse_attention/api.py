"""Sparse attention: each query group attends to the keys that a KVSelection lists for it. Not causal; MHA and GQA.

For a query t of head i in row (batch, i, t // q_block_size), with J the row's keys that lie before kv_length:
lse = log sum_J exp(softmax_scale * q.k_j), out = sum_J exp(softmax_scale * q.k_j - lse) v_j.
A row that attends to nothing gives out 0, lse -inf and zero gradients. A dense row (row_start -1) takes every valid
key.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), Nq query groups, d head
dim. q, out, dout [s, b, h, d]; k, v [sk, b, G, d]; lse [b, h, s] natural log, fp32 (fp64 for fp64 inputs).
Any strides with a last stride of 1; the outputs are contiguous. s and sk need not be multiples of the block sizes.

Backends: ``reference`` (eager, exact, fp32 or fp64); ``triton`` (bf16, fp16, fp32; CUDA, or TRITON_INTERPRET=1 on the
CPU); ``flash4`` (flash-attn-4: Hopper, 128 x 128 blocks) and ``cudnn`` (nvidia-cudnn-frontend: Hopper, 64 x 64 and
128 x 128 blocks, bf16, head dim 128), which want finite padding within the block where the keys end; ``auto``
(reference on the CPU; on CUDA, of those that can serve the request, the fastest measured for the pass; logged once).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_layout import check_backward, check_qkv, resolve_scale
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.choice import BACKENDS
from megatron_dsv.kernels.sparse_attention.op import attend, flatten, run_backward, run_forward


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float | None = None,
                     backend: str = "auto", deterministic: bool = False) -> Tensor:
    """Attention over the selected keys, differentiable in q, k and v. No graph break under torch.compile.

    Args:
        q: [s, b, h, d].
        k, v: [sk, b, G, d].
        selection: for exactly these s queries and sk keys. Attach its key-major twin (``with_transposed``) when it is
            used more than once; the backward builds it otherwise.
        softmax_scale: default 1 / sqrt(d).
        backend: one of ``BACKENDS``.
        deterministic: repeats must agree bitwise. On ``triton`` only token lists (kv_block_size 1) need it: their dK
            and dV use fp32 atomics otherwise, and are added in order, slower, with it. ``flash4`` and ``cudnn`` refuse.

    Returns:
        out [s, b, h, d] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, backend or selection do not fit.
        NotImplementedError: the backend cannot serve the request; the message names the way out.
    """
    scale = _check(q, k, v, selection, softmax_scale, backend)
    return attend(q, k, v, *flatten(selection), scale, backend, deterministic)[0]


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float | None = None,
            backend: str = "auto", deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s], without autograd. Arguments and errors as in ``sparse_attention``.

    With ``deterministic``, ``auto`` takes the backend of the deterministic backward, whatever the number of heads.
    """
    scale = _check(q, k, v, selection, softmax_scale, backend)
    return run_forward(q, k, v, *flatten(selection), scale, backend, deterministic)


@torch.no_grad()
def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float | None = None, backend: str = "auto",
             deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d].

    ``out`` and ``lse`` may be merged results over more keys than k, v hold: the gradients are then those of the
    merged softmax with respect to these k, v, and their share of dq. Other arguments and errors as in
    ``sparse_attention``.
    """
    scale = _check(q, k, v, selection, softmax_scale, backend)
    check_backward(dout, q, out, lse)
    return run_backward(dout, q, k, v, out, lse, *flatten(selection), scale, backend, deterministic)


def _check(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, softmax_scale: float | None,
           backend: str) -> float:
    check_qkv(q, k, v)
    if backend not in BACKENDS:
        raise ValueError(f"backend of sparse_attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if (selection.num_queries, selection.num_keys) != (q.shape[0], k.shape[0]):
        raise ValueError(f"selection must be for the {q.shape[0]} queries and {k.shape[0]} keys passed, got "
                         f"num_queries={selection.num_queries}, num_keys={selection.num_keys}")
    rows, lengths = (q.shape[1], q.shape[2], selection.num_query_groups), (k.shape[1], k.shape[2])
    if tuple(selection.row_start.shape) != rows:
        raise ValueError(f"selection.row_start must be [b, h, Nq] = {rows}, got {tuple(selection.row_start.shape)}")
    if tuple(selection.kv_length.shape) != lengths:
        raise ValueError(f"selection.kv_length must be [b, G] = {lengths}, got {tuple(selection.kv_length.shape)}")
    twin = selection.transposed
    for part in (selection,) if twin is None else (selection, twin):
        for x in (part.kv_indices, part.row_start, part.row_count, part.kv_length):
            if x.device != q.device:
                raise ValueError(f"selection must lie on the device of q, {q.device}, got {x.device}")
    twin_rows = (*rows[:2], selection.num_kv_blocks)
    if twin is not None and tuple(twin.row_start.shape) != twin_rows:
        raise ValueError(f"selection.transposed.row_start must be [b, h, Nk] = {twin_rows}, "
                         f"got {tuple(twin.row_start.shape)}")
    return resolve_scale(softmax_scale, q)
