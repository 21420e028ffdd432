"""A naive oracle for attention ops, and random selections to feed them; independent of every backend.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of one attention problem. ``kv_padding`` is the number of padding keys at the end of each item."""

    s: int
    sk: int
    b: int
    h: int
    heads_kv: int
    d: int
    q_block: int
    kv_block: int
    kv_padding: int = 0
    keep: float = 0.4

    def __str__(self) -> str:
        return (f"s{self.s}x{self.sk}-b{self.b}-h{self.h}:{self.heads_kv}-d{self.d}-q{self.q_block}-kv{self.kv_block}"
                f"-pad{self.kv_padding}")


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention as written in a textbook, under autograd, in the inputs' dtype.

    Args:
        q: [s, b, h, d].
        k, v: [sk, b, G, d].
        mask: bool [b, h, s, sk], True where a query attends.

    Returns:
        out [s, b, h, d], lse [b, h, s].
    """
    repeat = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    logits = torch.einsum("sbhd,tbhd->bhst", q, keys) * softmax_scale
    weights = torch.where(mask, torch.exp(logits - logits.amax(-1, keepdim=True).detach()), 0)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhst,tbhd->sbhd", weights / total.clamp_min(1e-300), values)
    return out, torch.log(total[..., 0]) + logits.amax(-1)


def rounded_reference(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor,
                      softmax_scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) as a textbook kernel computes them: fp32 sums, with P, dS and the results rounded to q's dtype.

    Its error against fp64 is what a low-precision kernel may be measured by. Shapes as in ``oracle``.
    """
    repeat = q.shape[2] // k.shape[2]
    queries, douts = (x.permute(1, 2, 0, 3).float() for x in (q, dout))
    keys, values = (x.permute(1, 2, 0, 3).float().repeat_interleave(repeat, 1) for x in (k, v))
    logits = (queries @ keys.transpose(-1, -2) * softmax_scale).masked_fill(~mask, -torch.inf)
    probs = torch.softmax(logits, -1).nan_to_num(0.0)
    out = (probs.to(q.dtype).float() @ values).to(q.dtype)
    delta = (out.float() * douts).sum(-1, keepdim=True)
    dscores = probs * (douts @ values.transpose(-1, -2) - delta)
    dscores = dscores.to(q.dtype).float()
    dq = dscores @ keys * softmax_scale
    dk = (dscores.transpose(-1, -2) @ queries * softmax_scale).unflatten(1, (-1, repeat)).sum(2)
    dv = (probs.to(q.dtype).float().transpose(-1, -2) @ douts).unflatten(1, (-1, repeat)).sum(2)
    out, dq, dk, dv = (x.to(q.dtype).permute(2, 0, 1, 3) for x in (out, dq, dk, dv))
    return out, dq, dk, dv


def assert_within_budget(got: Tensor, rounded: Tensor, exact: Tensor, name: str) -> None:
    """Raises AssertionError unless max|got - exact| <= 2 * (max|rounded - exact| + eps * max|exact|), and no NaN."""
    error = (got.double() - exact.double()).abs().max().item()
    rounding = torch.finfo(got.dtype).eps * exact.abs().max().item()
    budget = 2 * ((rounded.double() - exact.double()).abs().max().item() + rounding)
    assert error <= budget, f"{name}: error {error:.3e} exceeds the budget {budget:.3e}"


def token_mask(block_mask: Tensor, selection: KVSelection) -> Tensor:
    """bool [b, h, s, sk] from bool [b, h, Nq, Nk], with the keys at or after kv_length off."""
    rows = torch.arange(selection.num_queries, device=block_mask.device) // selection.q_block_size
    cols = torch.arange(selection.num_keys, device=block_mask.device)
    mask = block_mask[:, :, rows][..., cols // selection.kv_block_size]
    length = selection.kv_length.repeat_interleave(block_mask.shape[1] // selection.kv_length.shape[1], 1)
    return mask & (cols < length[..., None, None])


def random_selection(case: AttentionCase, *, seed: int = 0, special_rows: bool = True,
                     device: str = "cpu") -> tuple[KVSelection, Tensor]:
    """A selection whose rows keep anything from no block to all, and its block mask [b, h, Nq, Nk].

    Rows lie in the buffer in random order with garbage between them. With ``special_rows`` some are dense and some
    empty, and some list blocks that hold nothing but padding.
    """
    generator = torch.Generator().manual_seed(seed)
    nq, nk = -(-case.s // case.q_block), -(-case.sk // case.kv_block)
    shape = (case.b, case.h, nq)
    keep = torch.full((*shape, 1), case.keep)
    if special_rows:
        keep = (keep * 2 * torch.rand(*shape, 1, generator=generator)).clamp_max(1)
    mask = torch.rand(*shape, nk, generator=generator) < keep
    kind = torch.rand(shape, generator=generator) if special_rows else torch.ones(shape)
    mask[kind < 0.1] = False
    row_start = torch.zeros(shape, dtype=torch.int64)
    buffer: list[int] = []
    for flat in torch.randperm(row_start.numel(), generator=generator).tolist():
        buffer.extend([-12345] * int(torch.randint(0, 3, (), generator=generator)))
        row_start.view(-1)[flat] = len(buffer)
        buffer.extend(mask.reshape(-1, nk)[flat].nonzero()[:, 0].tolist())
    row_count = mask.sum(-1, dtype=torch.int32)
    dense = kind > 0.9 if special_rows else torch.zeros(shape, dtype=torch.bool)
    row_start[dense], mask[dense] = DENSE_ROW, True
    kv_length = torch.full((case.b, case.heads_kv), case.sk - case.kv_padding, dtype=torch.int32)
    if case.kv_padding and special_rows:
        kv_length[0, 0] -= case.kv_padding // 2
    selection = KVSelection(
        kv_indices=torch.tensor(buffer, dtype=torch.int32, device=device), row_start=row_start.to(device),
        row_count=row_count.to(device), kv_length=kv_length.to(device), num_queries=case.s, num_keys=case.sk,
        q_block_size=case.q_block, kv_block_size=case.kv_block, max_row_count=nk)
    return selection, mask.to(device)


def random_qkv(case: AttentionCase, *, seed: int = 0, dtype: torch.dtype = torch.float64,
               device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout with head-major strides, so that an op that assumes contiguity fails."""
    generator = torch.Generator().manual_seed(seed)

    def make(tokens: int, heads: int) -> Tensor:
        x = torch.randn(case.b, heads, tokens, case.d, generator=generator, dtype=torch.float64)
        return x.to(dtype).to(device).permute(2, 0, 1, 3)

    return make(case.s, case.h), make(case.sk, case.heads_kv), make(case.sk, case.heads_kv), make(case.s, case.h)
