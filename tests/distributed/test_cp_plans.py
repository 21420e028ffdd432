"""Plans change by all ranks or by none, and a rank that is lost is named, not waited for."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cp_cases import Problem, Whole, make_plan, run_block, worst_error
from cp_schemes import all_splits, prepared, scheme_of

from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.plan import CPPlan, Topology
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.testing.ranks import run_ranks

SHORT = timedelta(seconds=3)
READ = CPPlan.from_json


def plan_of(problem: Problem, version: int, *, seed: int = 0) -> CPPlan:
    """Two blocks, each its own random split."""
    chance = random.Random(seed)
    blocks = tuple(make_plan(chance.choice(all_splits(problem.ranks)), problem, stages=chance.randint(1, 3),
                             seed=chance.randrange(99), layer=layer) for layer in range(2))
    return CPPlan(version, version, Topology(problem.ranks), ((1, problem.tokens),), (blocks,))


def store_of(problem: Problem, *, node_ranks: int = 1, backing: str = "parents", check=lambda plan: None) -> PlanStore:
    manager = CPGroupManager(dist.group.WORLD, node_ranks=node_ranks, backing=backing)
    return PlanStore(plan_of(problem, 0), manager, check)


def proposed(store: PlanStore, plan: CPPlan, **options) -> object:
    return store.propose(plan if dist.get_rank() == 0 else None, dist.group.WORLD, **options)


def commits_then_refusals(problem: Problem) -> list[tuple]:
    """A good plan; one that rank 2 alone refuses; one that rank 1 reads differently; an old one; a good one."""

    def check(plan: CPPlan) -> None:
        if plan.version == 2 and dist.get_rank() == 2:
            raise ValueError("does not fit this rank's memory")

    store = store_of(problem, check=check)
    outcomes = []
    for version in (1, 2, 3, 1, 4):
        if version == 3 and dist.get_rank() == 1:
            # A bit flipped on the way, or another release on this host.
            CPPlan.from_json = classmethod(lambda cls, text: replace(READ(text), stats_digest="other"))
        decision = proposed(store, plan_of(problem, version, seed=version))
        CPPlan.from_json = READ
        outcomes.append((decision.committed, decision.refused_by, decision.reason, store.plan.version,
                         store.plan.digest))
    return outcomes


def test_a_plan_is_taken_by_all_or_by_none():
    problem = Problem(4)
    ranks = run_ranks(commits_then_refusals, 4, problem)
    for outcomes in ranks:
        assert [(committed, refused, version) for committed, refused, _, version, _ in outcomes] == [
            (True, -1, 1), (False, 2, 1), (False, -1, 1), (False, 0, 1), (True, -1, 4)]
        assert outcomes[1][4] == outcomes[2][4] == plan_of(problem, 1, seed=1).digest
    assert [outcomes[1][2] for outcomes in ranks] == ["", "", "does not fit this rank's memory", ""]
    assert all("different plans" in outcomes[2][2] for outcomes in ranks)
    assert "plan 1 is not newer than plan 1" in ranks[0][3][2]


def garbage(problem: Problem) -> tuple:
    store = store_of(problem)

    class Garbage:
        @staticmethod
        def to_json() -> str:
            return "{"

    decision = proposed(store, Garbage())
    return decision.committed, decision.refused_by, decision.reason, store.plan.version


def test_garbage_is_refused_by_all():
    for outcome in run_ranks(garbage, 2, Problem(2)):
        assert outcome[:2] == (False, 0)
        assert "not JSON" in outcome[2]
        assert outcome[3] == 0


def lost_rank(problem: Problem, how: int) -> tuple[str, str, float]:
    """Rank 1 is killed or stopped when the others vote."""
    store = store_of(problem)
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        if how == signal.SIGSTOP:
            time.sleep(60)
        os.kill(os.getpid(), how)
    try:
        proposed(store, plan_of(problem, 1), timeout=SHORT)
    except (RuntimeError, TimeoutError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_a_lost_rank_is_named_and_not_waited_for(how, tmp_path):
    def reports(problem: Problem) -> None:
        name, message, seconds = lost_rank(problem, how)
        (tmp_path / f"{dist.get_rank()}").write_text(f"{name}|{seconds}|{message}")
        os._exit(0)

    with pytest.raises(Exception, match="rank"):
        run_ranks(reports, 3, Problem(3, units=3), timeout=12)
    for rank in (0, 2):
        name, seconds, message = (tmp_path / str(rank)).read_text().split("|", 2)
        assert name in ("TimeoutError", "RuntimeError")
        assert float(seconds) < 10
        assert "plan 0 in force" in message
        assert "new plan among 3 ranks" in message
        assert "resume from its last checkpoint" in message


def replans(whole: Whole, count: int, node_ranks: int, backing: str) -> tuple[float, int, int]:
    """Random plans, each followed by an exchange; (worst error, communicators after the first, versions)."""
    problem = whole.problem
    store = store_of(problem, node_ranks=node_ranks, backing=backing)
    store.manager.prepare(all_splits(problem.ranks))
    made, worst = len(store.manager._made), 0.0
    scheme = scheme_of(store.manager, problem)
    for version in range(1, count + 1):
        assert proposed(store, plan_of(problem, version, seed=version)).committed
        plan = store.block(problem.tokens, version % 2)
        worst = max(worst, worst_error(run_block(scheme, whole, plan), whole, store.manager.rank))
    return worst, len(store.manager._made) - made, store.plan.version


@pytest.mark.parametrize(("ranks", "node_ranks", "backing"), [(4, 2, "dedicated"), (6, 3, "parents")])
def test_random_plans_one_after_the_other(ranks, node_ranks, backing):
    # Six ranks on nodes of three: head groups of two straddle a node, and must not split over two communicators.
    whole = Whole(Problem(ranks, batch=1, units=3, chunk=4, padding=3))
    for worst, made, version in run_ranks(replans, ranks, whole, 12, node_ranks, backing):
        assert worst < 1e-12
        assert made == 0
        assert version == 12


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_random_plans():
    whole = Whole(Problem(4, batch=1, units=3, chunk=4, padding=3))
    for worst, made, version in run_ranks(replans, 4, whole, 10_000, 2, "parents", timeout=2900):
        assert worst < 1e-12
        assert made == 0
        assert version == 10_000


def sampled(whole: Whole) -> tuple[torch.Tensor, torch.Tensor]:
    scheme = scheme_of(prepared(4, node_ranks=2), whole.problem)
    mine = whole.q.chunk(4)[dist.get_rank()]
    rows = torch.tensor([31, 0, 7, 8, 8, 20])
    manager = scheme.manager
    manager.log.recording = True
    one, other = scheme.gather_rows([mine, mine[:, :, :1] * 2], rows)
    assert torch.equal(other, one[:, :, :1] * 2)
    assert len(manager.log.calls) == 1
    assert [x.dtype for x in scheme.gather_rows([mine, mine.float()], rows)] == [mine.dtype, torch.float32]
    return one, scheme.reduce_rows(torch.tensor([1.5, float(dist.get_rank())]))


def test_rows_and_sums_reach_every_rank():
    whole = Whole(Problem(4))
    for rows, sums in run_ranks(sampled, 4, whole):
        assert torch.equal(rows, whole.q[[31, 0, 7, 8, 8, 20]])
        assert sums.tolist() == [6.0, 6.0]


def whole_heads(whole: Whole, lengths: torch.Tensor) -> tuple[torch.Tensor, range, torch.Tensor]:
    scheme = scheme_of(prepared(6, node_ranks=3), whole.problem)
    mine = whole.k.chunk(6)[dist.get_rank()]
    return *scheme.by_heads(mine), scheme.own_length(lengths, len(mine))


def test_tokens_are_traded_for_whole_heads_and_lengths_for_their_share():
    """Four heads on six ranks: two get none. Real tokens may end in the first chunk, in the middle, or nowhere."""
    whole = Whole(Problem(6, units=4, batch=2))
    tokens, chunk = whole.problem.tokens, whole.problem.chunk
    lengths = torch.tensor([1, chunk + 3, tokens], dtype=torch.int32)
    seen, shares = [], []
    for traded, heads, own in run_ranks(whole_heads, 6, whole, lengths):
        assert torch.equal(traded, whole.k[:, :, list(heads)])
        seen.append(list(heads))
        shares.append(own)
    assert [head for heads in seen for head in heads] == [0, 1, 2, 3]
    assert seen.count([]) == 2
    assert torch.equal(torch.stack(shares), torch.tensor(
        [[1, chunk, chunk], [0, 3, chunk], *[[0, 0, chunk]] * 4], dtype=torch.int32))


def failing_exchange(problem: Problem) -> str:
    """Rank 1 leaves before an exchange."""
    store = store_of(problem)
    if dist.get_rank() == 1:
        os._exit(1)
    time.sleep(0.3)
    try:
        run_block(scheme_of(store.manager, problem), Whole(problem), store.block(problem.tokens, 0))
    except RuntimeError as error:
        return str(error)
    return "nothing failed"


def test_a_failed_exchange_names_plan_block_and_group(tmp_path):
    def reports(problem: Problem) -> None:
        (tmp_path / "message").write_text(failing_exchange(problem))
        os._exit(0)

    with pytest.raises(Exception, match="rank"):
        run_ranks(reports, 2, Problem(2), timeout=20)
    message = (tmp_path / "message").read_text()
    assert message.startswith("context parallelism, plan 0: block 0 as (")
    assert "on contiguous(2), ranks [0, 1], over the context-parallel communicator, failed" in message


def test_a_split_that_was_not_prepared_is_refused():
    def ask(problem: Problem) -> str:
        manager = CPGroupManager(dist.group.WORLD, node_ranks=2)
        manager.prepare(all_splits(4)[:1])
        with pytest.raises(ValueError, match="was not prepared") as caught:
            run_block(scheme_of(manager, problem), Whole(problem), make_plan(all_splits(4)[1], problem))
        with pytest.raises(ValueError, match="node_ranks must divide the 4 context-parallel ranks, got 3"):
            CPGroupManager(dist.group.WORLD, node_ranks=3)
        with pytest.raises(ValueError, match="backing of context-parallel groups must be one of parents"):
            CPGroupManager(dist.group.WORLD, node_ranks=2, backing="own")
        with pytest.raises(ValueError, match="g_h x g_s must be the context-parallel size, 4, got"):
            manager.prepare([*all_splits(4), *all_splits(2)])
        return str(caught.value)

    assert all("never made in a step" in message for message in run_ranks(ask, 4, Problem(4)))
