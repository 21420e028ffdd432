"""Correctness before any number: one GPU's block against fp64 on samples, and every rank's share against one GPU's.

The one-GPU block attends to the very lists that the ranks selected, so that its attention is the ranks' attention; how
far those lists agree with lists selected on one GPU is checked apart.

Dims: S tokens of the sequence, s of this rank, h heads, d head dim, Nq query groups, Nk key blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dsv.context_parallel.trial_block import TrialBlock, TrialInputs, TrialShape
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import KVSelection, from_block_mask
from megatron_dsv.kernels.sparse_attention import api as sparse
from megatron_dsv.testing.attention_oracle import oracle, rounded_reference

NAMES = ("out", "dq", "dk", "dv")
LEAST_AGREEMENT = 0.999
"""Share of listed blocks that ranks and one GPU must select alike; the rest are ties that a product of another shape
rounds differently."""


def _unit(dtype: torch.dtype) -> float:
    """Relative rounding of a kernel's result. The vectorised exp of torch's fp32 kernels on a CPU may be 20 units off
    (Sleef's u20 functions, taken or not by instruction set)."""
    return torch.finfo(dtype).eps * (20 if dtype == torch.float32 else 1)


class GateError(Exception):
    """A result is wrong; no number of its case may be printed."""


def whole_mask(block: TrialBlock, selection: KVSelection | None, ranks: int, rank: int,
               group: dist.ProcessGroup | None) -> Tensor:
    """bool [1, h, Nq, Nk]: the lists of all ranks together, on every rank."""
    shape = block.shape
    groups = shape.tokens // shape.q_block
    device = block.inputs.x.device
    mask = torch.zeros((1, shape.heads, groups, shape.blocks), dtype=torch.uint8, device=device)
    if selection is not None:
        heads, rows = list(range(shape.heads)), list(range(groups))
        if block.plan is not None:
            heads = sorted(block.plan.units_of(0, block.plan.split.h_rank(rank)))
            per_chunk = groups // ranks
            rows = [chunk * per_chunk + row for chunk in block.plan.split.h_group(rank) for row in range(per_chunk)]
        index = torch.tensor(rows, device=device)
        for place, head in enumerate(heads):
            mask[0, head, index] = head_mask(selection, place).to(torch.uint8)
    if group is not None and ranks > 1 and block.plan is not None:
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group)
    return mask.bool()


def head_mask(selection: KVSelection, head: int) -> Tensor:
    """bool [Nq, Nk] of one head."""
    rows = slice(head, head + 1)
    return replace(selection, row_start=selection.row_start[:, rows], row_count=selection.row_count[:, rows],
                   kv_length=selection.kv_length[:, rows], transposed=None).block_mask()[0, 0]


def check_lists(mask: Tensor, alone: Tensor, budgets: tuple[int, ...], what: str) -> float:
    """Share of the lists on which ranks and one GPU agree.

    Raises:
        GateError: a row does not keep its budget, or they differ in more than ties.
    """
    counts = mask.sum(-1)[0]
    wanted = torch.tensor(budgets, device=mask.device)[:, None]
    if bool((counts != wanted).any()):
        raise GateError(f"{what}: {int((counts != wanted).sum())} rows do not keep their budget")
    agreement = float((mask & alone).sum() / mask.sum())
    if agreement < LEAST_AGREEMENT:
        raise GateError(f"{what}: lists agree with those of one GPU in {agreement:.5f} of their blocks, at least "
                        f"{LEAST_AGREEMENT} is expected")
    return agreement


class Reference:
    """out, dq, dk, dv of the whole sequence on one GPU for given lists (None: dense), checked on samples."""

    def __init__(self, shape: TrialShape, inputs: TrialInputs, mask: Tensor | None, *, dense_backend: str,
                 sparse_backend: str, samples: int = 3) -> None:
        self.shape, self.inputs, self.mask = shape, inputs, mask
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
        scale = shape.head_dim**-0.5
        if mask is None:
            out, lse = dense.forward(q, k, v, softmax_scale=scale, backend=dense_backend)
            grads = dense.backward(inputs.dout, q, k, v, out, lse, softmax_scale=scale, backend=dense_backend)
        else:
            lengths = torch.full((1, shape.heads), shape.tokens, dtype=torch.int32, device=q.device)
            selection = from_block_mask(mask, lengths, num_queries=shape.tokens, num_keys=shape.tokens,
                                        q_block_size=shape.q_block, kv_block_size=shape.kv_block,
                                        max_row_count=int(mask.sum(-1).max()))
            out, lse = sparse.forward(q, k, v, selection, softmax_scale=scale, backend=sparse_backend)
            grads = sparse.backward(inputs.dout, q, k, v, out, lse, selection, softmax_scale=scale,
                                    backend=sparse_backend)
        self.tensors = (out, *grads)
        self.lse = lse
        # Relative error that rounding alone brings, the largest of the samples.
        self.rounding = 0.0
        for head in (0, shape.heads - 1):
            for place in torch.linspace(0, shape.tokens // shape.q_block - 1, samples).long().tolist():
                self._check_rows(head, place, scale)
            for place in torch.linspace(0, shape.blocks - 1, samples).long().tolist():
                self._check_keys(head, place, scale)

    def _check_rows(self, head: int, group: int, scale: float) -> None:
        """out and dq of one query group over the keys it lists."""
        x, one = self.inputs, slice(head, head + 1)
        rows = slice(group * self.shape.q_block, (group + 1) * self.shape.q_block)
        keys = self._tokens(None if self.mask is None else self.mask[0, head, group], self.shape.kv_block)
        parts = [y.detach()[index, :, one] for y, index in ((x.dout, rows), (x.q, rows), (x.k, keys), (x.v, keys))]
        allowed = torch.ones(1, 1, parts[1].shape[0], len(keys), dtype=torch.bool, device=keys.device)
        rounded = rounded_reference(*parts, allowed, scale)[:2]
        leaves = [y.double().requires_grad_() for y in parts[1:]]
        out, _ = oracle(*leaves, allowed, scale)
        exact = (out.detach(), *torch.autograd.grad(out, leaves, parts[0].double()))[:2]
        got = [self.tensors[number][rows, :, one] for number in (0, 1)]
        self._within(NAMES[:2], got, rounded, exact, f"rows at token {rows.start}, head {head}")

    def _check_keys(self, head: int, block: int, scale: float) -> None:
        """dk and dv of one key block over the groups that list it, from the reference's own out and lse."""
        x = self.inputs
        keys = slice(block * self.shape.kv_block, (block + 1) * self.shape.kv_block)
        rows = self._tokens(None if self.mask is None else self.mask[0, head, :, block], self.shape.q_block)

        def gradients(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
            wide = torch.float64 if dtype is None else torch.float32
            q, dout, out = (y.detach()[rows, 0, head].to(wide) for y in (x.q, x.dout, self.tensors[0]))
            k, v = (y.detach()[keys, 0, head].to(wide) for y in (x.k, x.v))
            probs = torch.exp(q @ k.t() * scale - self.lse[0, head, rows].to(wide)[:, None])
            dscores = probs * (dout @ v.t() - (out * dout).sum(-1, keepdim=True))
            if dtype is not None:
                probs, dscores = probs.to(dtype).to(wide), dscores.to(dtype).to(wide)
            dk, dv = dscores.t() @ q * scale, probs.t() @ dout
            return (dk, dv) if dtype is None else (dk.to(dtype), dv.to(dtype))

        got = [self.tensors[number][keys, 0, head] for number in (2, 3)]
        self._within(NAMES[2:], got, gradients(x.q.dtype), gradients(None), f"keys at token {keys.start}, head {head}")

    def _within(self, names, got, rounded, exact, where: str) -> None:
        for name, mine, low, true in zip(names, got, rounded, exact, strict=True):
            budget = 2 * ((low.double() - true).abs().max() + _unit(mine.dtype) * true.abs().max())
            error = (mine.double() - true).abs().max()
            if not bool(error <= budget):
                raise GateError(f"one GPU, {name}, {where}: error {float(error):.3e}, budget {float(budget):.3e}")
            self.rounding = max(self.rounding, float((low.double() - true).norm() / true.norm()))

    def _tokens(self, listed: Tensor | None, size: int) -> Tensor:
        device = self.inputs.q.device
        if listed is None:
            return torch.arange(self.shape.tokens, device=device)
        return (listed.nonzero()[:, :1] * size + torch.arange(size, device=device)).reshape(-1)

    def check_share(self, got: tuple[Tensor, ...], rank: int, ranks: int, parts: int, what: str) -> float:
        """A rank's out, dq, dk, dv against its chunk; every (block of tokens, head) on its own.

        Both round as the samples do, and each of ``parts`` partial results once more; twice that is the budget of a
        cell's relative error. Returns the worst cell's.

        Raises:
            GateError: a cell is outside it, or not finite.
        """
        worst = 0.0
        for name, mine, whole in zip(NAMES, got, self.tensors, strict=True):
            true = whole.chunk(ranks)[rank]
            size = self.shape.kv_block if name in ("dk", "dv") else self.shape.q_block
            difference, length = ((y.detach().float().unflatten(0, (-1, size)).square().sum((1, 2, 4)))
                                  for y in (mine.float() - true.float(), true))
            # A cell that is small by chance is held against the mean one.
            error = (difference / torch.maximum(length, length.mean())).sqrt()
            budget = 2 * (1 + parts) * (self.rounding + _unit(mine.dtype) / 2)
            if not bool((error <= budget).all()):
                raise GateError(f"{what}, {name}: {int((~(error <= budget)).sum())} of {error.numel()} cells are "
                                f"outside the budget {budget:.2e}, the worst is {float(error.max()):.2e}")
            worst = max(worst, float(error.max()))
        return worst
