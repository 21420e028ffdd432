"""Correctness before any number: small problems against fp64, and samples of the timed problem itself.

Tolerance: err(kernel vs fp64) <= 2 x (err(rounded textbook kernel vs fp64) + rounding), per tensor; where a head is
dense, the rounded kernel is a real dense one.

Dims: S tokens, h heads, d head dim, Nq query groups, Nk key blocks; batch 1.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from attention import inputs
from attention.cases import RANK, Point, Shape
from attention.pipeline import DenseRun, SparseRun
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.testing.attention_oracle import assert_within_budget, oracle, rounded_reference, token_mask

GATE_TOKENS = 2048
GATE_HEADS = 6
GATE_KEEP = 0.5
_NAMES = ("out", "dq", "dk", "dv")


def _small(shape: Shape) -> Shape:
    """The problem that the gate of ``shape`` computes: its head dim, few heads and tokens."""
    return replace(shape, tokens=min(shape.tokens, GATE_TOKENS), heads=GATE_HEADS, shards=1, hidden=256)


class GateError(Exception):
    """A kernel or a selection is wrong; no number of it may be printed."""


def check_dense(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """A dense baseline at the head dim of ``shape``, on a small problem.

    Raises:
        GateError: it is outside the tolerance.
    """
    small = _small(shape)
    x = inputs.problem(small, device, dtype)
    run = DenseRun(name, x)
    out, lse = run.forward()
    mask = torch.ones(1, GATE_HEADS, small.tokens, small.tokens, dtype=torch.bool, device=device)
    _compare((out, *run.backward(out, lse)), x, mask, f"dense {name} d {shape.head_dim}")


def check_sparse(point: Point, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """The backend, granularity and head dim of a point, with uniform and skewed lists, on a small problem.

    Selection must equal a full sort; out and gradients must be within tolerance; under ``deterministic`` a repeat must
    agree bitwise.

    Raises:
        GateError: something is wrong.
    """
    small = _small(shape)
    x = inputs.problem(small, device, dtype)
    for lists in ("uniform", "skewed"):
        trial = replace(point, lists=lists, keep_ratio=GATE_KEEP)
        run = SparseRun(small, trial, x, inputs.hidden(small, trial, device, dtype), inputs.budgets(small, trial))
        what = f"{point.granularity} {point.backend} d {shape.head_dim} {lists} lists"
        selection = run.select()
        mask = selection.block_mask()
        # Tokens are chosen without a stored score: rounding may differ where scores are recomputed. Whole numbers
        # leave nothing to rounding, so there the lists must be exact.
        if trial.blocks[1] == 1:
            check_token_ties(trial, device, dtype)
        check_lists(mask, run.scores(), run.budgets, trial.blocks, what, tolerance=0 if trial.blocks[1] > 1 else 1e-3)
        out, lse = run.forward(selection)
        grads = run.backward(selection, out, lse)
        _compare((out, *grads), x, token_mask(mask, selection), what)
        if lists == "skewed":
            _compare_dense_heads((out, *grads), x, run.budgets, mask.shape[-1], what)
        if point.deterministic:
            again = run.forward(selection)
            if not all(torch.equal(a, b) for a, b in zip((out, lse, *grads),
                                                         (*again, *run.backward(selection, *again)))):
                raise GateError(f"{what}: a repeat differs under deterministic=True")


def check_token_ties(point: Point, device: torch.device, dtype: torch.dtype, tokens: int = 1024) -> None:
    """Token selection by small whole numbers, whose scores are exact and often equal, against a full sort.

    Raises:
        GateError: a row differs.
    """
    generator = torch.Generator(device).manual_seed(3)
    group = point.blocks[0]
    heads, budgets = 2, [group + 50, tokens // 2]
    q_pooled, k_lr = (torch.randint(-2, 3, (rows, 1, heads, RANK), device=device, generator=generator).to(dtype)
                      for rows in (tokens // group, tokens))
    selection = token_topk(q_pooled, k_lr, head_budgets=budgets, num_queries=tokens, q_block_size=group)
    scores = torch.einsum("qbhr,kbhr->bhqk", q_pooled.double(), k_lr.double())
    check_lists(selection.block_mask(), scores, budgets, point.blocks, f"{point.granularity} whole numbers")


def check_lists(mask: Tensor, scores: Tensor, budgets: list[int], blocks: tuple[int, int], what: str,
                tolerance: float = 0.0) -> None:
    """``mask`` [1, h, Nq, Nk] must hold the ``budgets`` best blocks of every row by a full sort of ``scores``.

    The group's own blocks come first, then larger scores, then lower numbers. With a ``tolerance``, scores that differ
    by less than that share of themselves may change places: for selections that never write their scores.

    Raises:
        GateError: a row differs.
    """
    groups, keys = mask.shape[2:]
    group, block = torch.arange(groups)[:, None], torch.arange(keys)
    q_block, kv_block = blocks
    own = ((block + 1) * kv_block > group * q_block) & (block * kv_block < (group + 1) * q_block)
    for head, budget in enumerate(budgets):
        kept, ranking = mask[0, head].cpu(), scores[0, head].double().cpu().masked_fill(own, torch.inf)
        count = max(budget, int(own.sum(1).max()))
        if tolerance:
            least = ranking.masked_fill(~kept, torch.inf).amin(1)
            left = ranking.masked_fill(kept | own, -torch.inf).amax(1)
            wrong = (kept.sum(1) != count) | (own & ~kept).any(1) | (left > least + tolerance * least.abs())
        else:
            order = ranking.sort(dim=-1, descending=True, stable=True).indices[:, :count]
            wrong = (torch.zeros_like(kept).scatter_(1, order, True) != kept).any(1)
        if wrong.any():
            raise GateError(f"{what}: {int(wrong.sum())} of {groups} rows of head {head} differ from a full sort, "
                            f"the first is row {int(wrong.nonzero()[0])}")


def check_samples(run: SparseRun, samples: int = 3) -> dict[str, float]:
    """Rows and key blocks of the timed problem against fp64, and how the lists are spread.

    Returns:
        density, the listed share of (row, block) pairs, and in_degree_max_over_mean, the most chosen block of a
        ragged head over the mean.

    Raises:
        GateError: a sample is outside the tolerance, or a row does not have its budget's entries.
    """
    x, (q_block, kv_block) = run.problem, run.point.blocks
    selection = run.select()
    out, lse = run.forward(selection)
    dq, dk, dv = run.backward(selection, out, lse)
    scale, heads = x.q.shape[-1]**-0.5, run.shape.heads
    what = f"{run.point.case} {run.point.granularity} {run.point.backend} {run.point.lists}"
    entries, spread = 0, 0.0
    for head in range(heads):
        mask = head_mask(selection, head)
        counts = mask.sum(1)
        if not bool((counts == run.budgets[head]).all()):
            raise GateError(f"{what}: head {head} keeps {int(counts.min())} to {int(counts.max())} blocks a row, "
                            f"its budget is {run.budgets[head]}")
        entries += int(counts.sum())
        degree = mask.sum(0, dtype=torch.float32)
        if run.budgets[head] < mask.shape[1]:
            spread = max(spread, float(degree.max() / degree.mean()))
        if head in (0, heads // 2, heads - 1):
            for group in torch.linspace(0, mask.shape[0] - 1, samples).long().tolist():
                rows = slice(group * q_block, (group + 1) * q_block)
                keys = _tokens(mask[group], kv_block, run.shape.tokens)
                _check_rows(x, out, dq, rows, keys, head, scale, what)
            for block in torch.linspace(0, mask.shape[1] - 1, samples).long().tolist():
                keys = slice(block * kv_block, (block + 1) * kv_block)
                rows = _tokens(mask[:, block], q_block, run.shape.tokens)
                _check_keys(x, out, lse, dk, dv, rows, keys, head, scale, what)
    pairs = heads * selection.num_query_groups * selection.num_kv_blocks
    return {"density": round(entries / pairs, 5), "in_degree_max_over_mean": round(spread, 2)}


def head_mask(selection: KVSelection, head: int) -> Tensor:
    """bool [Nq, Nk] of one head, without a rectangle for all of them."""
    rows = slice(head, head + 1)
    one = replace(selection, row_start=selection.row_start[:, rows], row_count=selection.row_count[:, rows],
                  kv_length=selection.kv_length[:, rows], transposed=None)
    return one.block_mask()[0, 0]


def _tokens(blocks: Tensor, size: int, tokens: int) -> Tensor:
    """Numbers of the tokens in the blocks that a bool vector marks."""
    found = blocks.nonzero()[:, :1] * size + torch.arange(size, device=blocks.device)
    return found.reshape(-1)[found.reshape(-1) < tokens]


def _compare(got: tuple[Tensor, ...], x: inputs.Problem, mask: Tensor, what: str) -> None:
    scale = x.q.shape[-1]**-0.5
    exact = _exact(x, mask, scale)
    rounded = rounded_reference(x.dout, x.q, x.k, x.v, mask, scale)
    _within(got, rounded, exact, what)


def _exact(x: inputs.Problem, mask: Tensor, scale: float) -> tuple[Tensor, ...]:
    leaves = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    out, _ = oracle(*leaves, mask, scale)
    return out.detach(), *torch.autograd.grad(out, leaves, x.dout.double())


def _compare_dense_heads(got: tuple[Tensor, ...], x: inputs.Problem, budgets: list[int], blocks: int,
                         what: str) -> None:
    """Heads that keep everything, against the error of a dense kernel on the same heads."""
    heads = [head for head, budget in enumerate(budgets) if budget == blocks]
    part = inputs.Problem(*(y[:, :, heads] for y in (x.q, x.k, x.v, x.dout)))
    mask = torch.ones(1, len(heads), x.q.shape[0], x.q.shape[0], dtype=torch.bool, device=x.q.device)
    run = DenseRun("sdpa", part)
    out, lse = run.forward()
    _within(tuple(y[:, :, heads] for y in got), (out, *run.backward(out, lse)),
            _exact(part, mask, x.q.shape[-1]**-0.5), f"{what}, dense heads")


def _within(got: tuple[Tensor, ...], rounded: tuple[Tensor, ...], exact: tuple[Tensor, ...], what: str,
            names: tuple[str, ...] = _NAMES) -> None:
    for name, mine, low, true in zip(names, got, rounded, exact, strict=True):
        if not bool(torch.isfinite(mine).all()):
            raise GateError(f"{what}: {name} holds values that are not finite")
        try:
            assert_within_budget(mine, low, true, name)
        except AssertionError as error:
            raise GateError(f"{what}: {error}") from error


def _check_rows(x: inputs.Problem, out: Tensor, dq: Tensor, rows: slice, keys: Tensor, head: int, scale: float,
                what: str) -> None:
    """out and dq of one query group over the keys it lists."""
    one = slice(head, head + 1)
    part = inputs.Problem(x.q[rows, :, one], x.k[keys, :, one], x.v[keys, :, one], x.dout[rows, :, one])
    mask = torch.ones(1, 1, part.q.shape[0], len(keys), dtype=torch.bool, device=keys.device)
    rounded = rounded_reference(part.dout, part.q, part.k, part.v, mask, scale)
    _within((out[rows, :, one], dq[rows, :, one]), rounded[:2], _exact(part, mask, scale)[:2],
            f"{what}, sampled rows at token {rows.start}, head {head}", ("out", "dq"))


def _check_keys(x: inputs.Problem, out: Tensor, lse: Tensor, dk: Tensor, dv: Tensor, rows: Tensor, keys: slice,
                head: int, scale: float, what: str) -> None:
    """dk and dv of one key block over the query groups that list it; lse and out are the kernel's own."""
    dtype = x.q.dtype
    sides = functools.partial(_key_gradients, lse[0, head, rows].double(), scale)
    mine = [y[rows, 0, head].double() for y in (x.q, x.dout, out)] + [y[keys, 0, head].double() for y in (x.k, x.v)]
    exact, rounded = sides(*mine), sides(*(y.float() for y in mine), round_to=dtype)
    _within((dk[keys, 0, head], dv[keys, 0, head]), rounded, exact,
            f"{what}, sampled keys at token {keys.start}, head {head}", ("dk", "dv"))


def _key_gradients(lse: Tensor, scale: float, q: Tensor, dout: Tensor, out: Tensor, k: Tensor, v: Tensor,
                   round_to: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """dk and dv, with P and dS rounded to ``round_to`` as a kernel does before its products."""
    def low(y: Tensor) -> Tensor:
        return y if round_to is None else y.to(round_to).to(q.dtype)

    probs = torch.exp(q @ k.t() * scale - lse.to(q.dtype)[:, None])
    dscores = probs * (dout @ v.t() - (out * dout).sum(-1, keepdim=True))
    return low(low(dscores).t() @ q * scale), low(low(probs).t() @ dout)
