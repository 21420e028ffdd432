"""Attention over context-parallel ranks equals one process, for every split, layout, assignment and exchange."""

from __future__ import annotations

import pytest
import torch
from cp_cases import SCALE, Problem, Whole, make_plan, run_block, worst_error
from cp_schemes import all_splits, prepared, scheme_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsv.context_parallel.selective_exchange import SelectiveExchange
from megatron_dsv.testing.ranks import run_ranks


def problems(ranks: int) -> list[Whole]:
    """MHA and GQA, blocks and tokens, padding that ends inside a block, and the dense block."""
    return [Whole(problem, seed) for seed, problem in enumerate((
        Problem(ranks),
        Problem(ranks, units=2, ratio=3, kv_block=1, batch=1, padding=5),
        Problem(ranks, units=5, kv_block=4, padding=11),
        Problem(ranks, units=3, ratio=2, dense=True, padding=11),
    ))]


def errors_of_rank(wholes: list[Whole], variants: list[tuple], node_ranks: int) -> list[tuple[str, float]]:
    """(case, error) of every problem under every variant: (split, stages, exchange)."""
    found = []
    manager = prepared(wholes[0].problem.ranks, node_ranks=node_ranks)
    for whole in wholes:
        scheme = scheme_of(manager, whole.problem)
        for number, (split, stages, exchange) in enumerate(variants):
            if whole.problem.dense and exchange == "selective":
                continue
            plan = make_plan(split, whole.problem, stages=stages, exchange=exchange, seed=number)
            error = worst_error(run_block(scheme, whole, plan), whole, scheme.manager.rank)
            found.append((f"{whole.problem} {plan}", error))
    return found


def check(ranks: int, variants: list[tuple], tolerance: float, wholes: list[Whole], node_ranks: int = 2) -> None:
    results = run_ranks(errors_of_rank, ranks, wholes, variants, node_ranks, timeout=280)
    assert all(result for result in results)
    worst = max((error, case) for result in results for case, error in result)
    assert worst[0] < tolerance, worst


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_equals_one_process(ranks):
    variants = [(split, 1 + number % 3, ("selective", "gather")[number % 4 == 3])
                for number, split in enumerate(all_splits(ranks))]
    check(ranks, variants, 1e-12, problems(ranks), node_ranks=3 if ranks == 6 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_equals_one_process_in_every_combination(ranks):
    variants = [(split, stages, exchange) for split in all_splits(ranks) for stages in range(1, min(4, ranks))
                for exchange in ("selective", "gather")]
    check(ranks, variants, 1e-12, problems(ranks), node_ranks=3 if ranks == 6 else 2)


class HostReads(TorchDispatchMode):
    """Counts operations whose result's value or size the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def reads_of_rank(whole: Whole) -> tuple[list[str], list[int]]:
    """What a block reads on the host, forward and backward, beside the row counts; and how often it reads those."""
    p, manager, counts, reads = whole.problem, prepared(4, node_ranks=2), [], HostReads()
    scheme = scheme_of(manager, p)
    whole.checks_low_rank = False
    inputs = (whole.q, whole.k, whole.v, whole.q_lr, whole.k_lr, whole.dout)
    q, k, v, q_lr, k_lr, dout = (x.chunk(4)[manager.rank] for x in inputs)
    host_counts = SelectiveExchange._host_counts
    for split in all_splits(4):
        plan = make_plan(split, p, stages=3)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        read: set[int] = set()
        SelectiveExchange._host_counts = lambda self, read=read: [host_counts(self), read.add(id(self._counts))][0]
        with reads:
            pending = scheme.begin(q_lr, k_lr, whole.select, plan)
            assert not read
            out = scheme.attend(q, k, v, pending, softmax_scale=SCALE)
            torch.autograd.grad(out, (q, k, v), dout)
        counts.append(len(read))
    assert reads.seen > 500
    return reads.names, counts


def test_a_block_reads_its_row_counts_once_and_nothing_else():
    for names, counts in run_ranks(reads_of_rank, 4, Whole(Problem(4, units=4, padding=3))):
        assert names == []
        # Where no key is exchanged nothing is read at all.
        assert counts == [1 if split.g_s > 1 else 0 for split in all_splits(4)]
