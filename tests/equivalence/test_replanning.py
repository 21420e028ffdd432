"""Planning while training, through the entry program: plans follow the profiles, and no plan changes what is computed.

On a cluster whose links are slow, what travels decides: a dense block, which needs all keys of its peers, is split by
heads, and one whose selections need few of them by sequence. So a layer's way from dense to sparse changes its split.
"""

import json
import re
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dsv import presets
from megatron_dsv.cli.main import main as dsv
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.training.main import main

SMALL = ("--num-layers 2 --global-batch-size 2 --init-method-std 0.2 --lr 1e-2 --dsv-predictor-lr 1e-2 "
         "--dsv-kv-block-size 4 --seed 11 --no-dsv-cp-correction ")
AUTO = f"{SMALL} --dsv-sparse-stage auto --dsv-gate-recall 0.05 --dsv-budget-mass 0.1"
SPARSE = f"{SMALL} --dsv-sparse-stage sparse --dsv-budget-mass 0.1"
CP2 = "--context-parallel-size 2"
READ = CPPlan.from_json


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> str:
    """Flags of planning on slow links, without latencies that would hide them at this size."""
    text = presets.path("cluster/h200").read_text()
    text = re.sub(r"gbps: \d+", "gbps: 0.0001", text)
    text = re.sub(r"latency-us: \d+, peer-us: \d+", "latency-us: 0, peer-us: 0", text)
    path = tmp_path_factory.mktemp("cluster") / "slow.yaml"
    path.write_text(text)
    return f"--dsv-cp-plan planned --dsv-cp-cluster {path}"


def watched(argv: list[str]) -> None:
    """The program; each rank prints the plans that it has put in force, and rank 1 may misread the first plan 2."""
    propose = PlanStore.propose
    faults = [b'"version":2'] if "--exit-signal-handler" in argv and dist.get_rank() == 1 else []

    def misreading(cls: type[CPPlan], text: bytes) -> CPPlan:
        if faults and faults[0] in text:
            text = text.replace(faults.pop(), b'"version":9')
        return READ(text)

    def printing(self: PlanStore, *args: Any, **named: Any) -> Any:
        decision = propose(self, *args, **named)
        print(f"IN FORCE {self.plan.version} {self.plan.digest}", flush=True)
        return decision

    CPPlan.from_json = classmethod(misreading)  # type: ignore[assignment, method-assign]
    PlanStore.propose = printing  # type: ignore[method-assign]
    main(argv)


def assert_same(log: Any, expected: Any, first: int = 0) -> None:
    assert log.iterations == expected.iterations[first:]
    assert log.loss("loss") == pytest.approx(expected.loss("loss")[first:], rel=2e-6)
    assert log.grad_norms == pytest.approx(expected.grad_norms[first:], rel=2e-5)


def said(log: Any, rank: int = 0) -> list[str]:
    """What a rank said of plans."""
    return [line.strip() for line in log.output[rank].splitlines()
            if re.match(r" (no new )?plan | the checkpoint's", line)]


def versions(log: Any) -> list[int]:
    """Versions in force after each proposal; all ranks must have had the same plans."""
    seen = [re.findall(r"IN FORCE (\d+) (\w+)", output) for output in log.output]
    assert all(other == seen[0] for other in seen)
    return [int(version) for version, _ in seen[0]]


@pytest.fixture(scope="module")
def one_rank(train):
    return train(f"{AUTO} --eval-iters 0", steps=12)


@pytest.fixture(scope="module")
def straight(train, planned, tmp_path_factory):
    """(folder, log) of twelve planned steps on two ranks, saved after ten."""
    folder = tmp_path_factory.mktemp("planned")
    log = train(f"{AUTO} {CP2} {planned} --eval-iters 0 --save {folder} --save-interval 10 --tensorboard-dir "
                f"{folder / 'tensorboard'}", 2, steps=12, main=watched)
    return folder, log


def test_the_plan_follows_the_layers_and_computes_what_one_rank_computes(straight, one_rank):
    folder, log = straight
    assert_same(log, one_rank)
    assert versions(log) == [1, 2, 3]
    first, sparse, measured = said(log)
    assert first.startswith("plan 1 at step 0: 2 x 1 in 2 blocks; 2 of 2 changed; predicted ")
    # The gate opens at the second profile; what selections need is known after the next.
    assert sparse.startswith("plan 2 at step 5: 2 x 1 in 2 blocks; 2 of 2 changed; predicted ")
    assert measured.startswith("plan 3 at step 7: 1 x 2 in 2 blocks; 2 of 2 changed; predicted ")
    assert said(log, 1) == []
    rows = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    assert [(row["step"], row["event"], row["version"]) for row in rows] == [
        (0, "committed", 1), (5, "committed", 2), (7, "committed", 3)]
    before, after = rows[-1]["predicted_ms"]
    assert after < 0.5 * before


def test_a_resumed_run_takes_the_plan_up_as_it_was(train, planned, straight):
    folder, expected = straight
    log = train(f"{AUTO} {CP2} {planned} --eval-iters 0 --load {folder} --ckpt-step 10", 2, steps=12, main=watched)
    assert versions(log) == [3]
    assert said(log) == ["plan 3 of the checkpoint at step 10: 1 x 2 in 2 blocks"]
    assert (log.losses, log.grad_norms) == (expected.losses[10:], expected.grad_norms[10:])


@pytest.mark.parametrize("layout", [
    pytest.param("--tensor-model-parallel-size 2", marks=pytest.mark.slow), "--pipeline-model-parallel-size 2"])
def test_another_topology_keeps_what_was_learned_and_plans_anew(train, planned, straight, one_rank, layout):
    folder, _ = straight
    log = train(f"{AUTO} {CP2} {layout} {planned} --eval-iters 0 --load {folder} --ckpt-step 10", 4, steps=12,
                main=watched)
    assert_same(log, one_rank, 10)
    assert versions(log) == [4]
    refused, anew = said(log)
    assert refused.startswith("the checkpoint's plan is not taken up at step 10: it was made for cp 2, tp 1, pp 1, ")
    assert refused.endswith("; it is solved anew")
    # By sequence at once: without the coverage of the run before, heads would be taken until a profile is in.
    assert anew.startswith("plan 4 at step 10: 1 x 2 in 2 blocks; ")


def test_a_plan_that_one_rank_reads_differently_is_taken_by_none_and_training_goes_on(train, planned):
    expected = train(f"{SPARSE} --eval-iters 0", steps=5)
    log = train(f"{SPARSE} {CP2} {planned} --eval-iters 0 --exit-signal-handler", 4, steps=5, main=watched)
    assert_same(log, expected)
    first, refused, again, *rest = said(log)
    assert first.startswith("plan 1 at step 0: ")
    assert refused == "plan 2 at step 1 refused by all, plan 1 stays in force: the ranks read different plans"
    assert again.startswith("plan 2 at step 3: ")
    assert versions(log) == [1, 1, 2, *range(3, 3 + len(rest))]


def test_what_a_run_recorded_is_what_dsv_reads(straight, tmp_path, capsys):
    folder, _ = straight
    trace = [json.loads(line) for line in (folder / "sparsity.jsonl").read_text().splitlines()]
    assert [row["step"] for row in trace] == [1, 3, 5, 7, 9, 11]
    assert [bool(row["layers"][0]["coverage"]) for row in trace] == [False] * 3 + [True] * 3
    out = tmp_path / "plan.json"
    assert dsv(["plan", "--model", str(folder / "config.yaml"), "--gpus", "2", "--tokens", "65536", "--layout",
                "1x1x2x1", "--sparsity", str(folder / "sparsity.jsonl"), "--json", str(out)]) == 0
    (data,) = json.loads(out.read_text())
    assert CPPlan.from_json(data["plan"]).topo.cp == 2
    capsys.readouterr()
    assert dsv(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "dsv/cp_plan" in shown
    assert [line.split()[:3] for line in shown.split("\n\n")[1].splitlines()[1:]] == [
        ["0", "1", "committed"], ["5", "2", "committed"], ["7", "3", "committed"]]
