"""From sampled rows and keys to the three launches.

Dims: R sampled rows, s keys, b batch, h query heads, G key/value heads, d head dim, r predictor rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.launching import (
    Launch,
    Tile,
    check_triton,
    kind_limit,
    launch_device,
    padded_dim,
    reach_limit,
)
from megatron_dsv.kernels.predictor_loss.triton.kernels import (
    _predictor_loss_bwd_dk_kernel,
    _predictor_loss_bwd_dq_kernel,
    _predictor_loss_fwd_kernel,
)

_SPAN_TOKENS = 2048
"""Keys that one program walks: enough to bury its start, few enough that few rows still fill the device."""

# (pass, widest padded head dim) -> Tile, for 16-bit inputs. The rows of 128 are the fastest of eight on an H200.
_TILES = {
    ("sums", 128): Tile(64, 64, 4, 3),
    ("sums", 256): Tile(64, 64, 4, 2),
    ("dq", 128): Tile(64, 64, 4, 3),
    ("dq", 256): Tile(64, 64, 4, 2),
    ("dk", 128): Tile(64, 64, 4, 2),
    ("dk", 256): Tile(64, 64, 4, 2),
}
# fp32 multiplies without tensor cores: small tiles keep it within registers, and compile within seconds.
_FP32_TILES = {128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}


def row_sums(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor) -> Tensor:
    """fp64 [6, b, h, R] of q_lr [R, b, h, r], k_lr [s, b, G, r], q [R, b, h, d], k [s, b, G, d]; kv_length [b, G]."""
    check_triton("predictor_loss", k.device, limit(q_lr, k_lr, q, k))
    q_lr, k_lr, q, k = _unit_last_stride(q_lr, k_lr, q, k)
    rows, b, h, _ = q.shape
    sums = torch.empty((6, max(1, num_spans(k.shape[0])), b, h, rows), dtype=torch.float64, device=q.device)
    if k.shape[0] == 0:
        return sums.new_zeros((6, b, h, rows))
    with launch_device(q):
        plan_sums(q_lr, k_lr, q, k, kv_length, sums).run()
    return sums.sum(1)


def gradients(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor,
              coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """dq [R, b, h, r] and dk [s, b, G, r] in the dtypes of q_lr and k_lr; coefficients [4, b, h, R]."""
    check_triton("predictor_loss", k.device, limit(q_lr, k_lr, q, k))
    q_lr, k_lr, q, k = _unit_last_stride(q_lr, k_lr, q, k)
    coefficients = coefficients.float().contiguous()
    dk = torch.empty(k_lr.shape, dtype=k_lr.dtype, device=k.device)
    dq = torch.empty((num_spans(k.shape[0]), *q_lr.shape), dtype=torch.float32, device=q.device)
    with launch_device(q):
        plan_dq(q_lr, k_lr, q, k, kv_length, coefficients, dq).run()
        plan_dk(q_lr, k_lr, q, k, kv_length, coefficients, dk).run()
    return dq.sum(0).to(q_lr.dtype), dk


def limit(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor) -> str | None:
    """What keeps these kernels from a request, or None."""
    return kind_limit((q, k), (q_lr, k_lr), widths="head dims and ranks") or reach_limit(1, q_lr, k_lr, q, k)


def num_spans(tokens: int) -> int:
    """Spans that the keys of a sequence are cut into."""
    return -(-tokens // _SPAN_TOKENS)


def plan_sums(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor, sums: Tensor) -> Launch:
    """The pass over keys for the rows' sums; writes sums [6, spans, b, h, R] contiguous."""
    return _plan_rows("sums", _predictor_loss_fwd_kernel, q_lr, k_lr, q, k, kv_length, sums_ptr=sums)


def plan_dq(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor, coefficients: Tensor,
            dq: Tensor) -> Launch:
    """The pass over keys for the rows' gradients; writes dq [spans, R, b, h, r] contiguous."""
    return _plan_rows("dq", _predictor_loss_bwd_dq_kernel, q_lr, k_lr, q, k, kv_length, coefficients_ptr=coefficients,
                      dq_ptr=dq)


def plan_dk(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor, coefficients: Tensor,
            dk: Tensor) -> Launch:
    """The pass over rows for the keys' gradients; writes dk [s, b, G, r] contiguous."""
    tile = _pick_tile("dk", q)
    grid = (-(-k.shape[0] // tile.block_n) * k.shape[1] * k.shape[2], 1)
    arguments = {**_arguments(q_lr, k_lr, q, k, kv_length), "coefficients_ptr": coefficients, "dk_ptr": dk}
    return Launch(_predictor_loss_bwd_dk_kernel, grid, arguments, _constants(q_lr, q, k, tile), tile)


def _plan_rows(pass_name: str, kernel: Any, q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor,
               **outputs: Tensor) -> Launch:
    tile = _pick_tile(pass_name, q)
    spans, ratio = num_spans(k.shape[0]), q.shape[2] // k.shape[2]
    grid = (-(-q.shape[0] * ratio // tile.block_m) * spans * k.shape[1] * k.shape[2], 1)
    arguments = {**_arguments(q_lr, k_lr, q, k, kv_length), **outputs, "spans": spans}
    return Launch(kernel, grid, arguments, {**_constants(q_lr, q, k, tile), "SPAN": _SPAN_TOKENS}, tile)


def _pick_tile(pass_name: str, q: Tensor) -> Tile:
    width = 128 if q.shape[-1] <= 128 else 256
    return _FP32_TILES[width] if q.dtype == torch.float32 else _TILES[pass_name, width]


def _arguments(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor) -> dict[str, Any]:
    strides = {f"stride_{name}{axis}": x.stride(i)
               for name, x, axes in (("q", q, "sbh"), ("k", k, "sbg"), ("ql", q_lr, "sbh"), ("kl", k_lr, "sbg"))
               for i, axis in enumerate(axes)}
    return {"q_ptr": q, "k_ptr": k, "q_lr_ptr": q_lr, "k_lr_ptr": k_lr, "kv_length_ptr": kv_length.contiguous(),
            **strides, "num_rows": q.shape[0], "num_keys": k.shape[0], "batches": k.shape[1], "kv_heads": k.shape[2]}


def _constants(q_lr: Tensor, q: Tensor, k: Tensor, tile: Tile) -> dict[str, int]:
    return {"RATIO": q.shape[2] // k.shape[2], "HEAD_DIM": q.shape[-1], "RANK": q_lr.shape[-1],
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": padded_dim(q.shape[-1]),
            "BLOCK_R": padded_dim(q_lr.shape[-1])}


def _unit_last_stride(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
