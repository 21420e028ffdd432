"""What the context-parallel benchmark promises: predictions first, gates that go red, exchanges replaced bit by bit."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from bench_cp import merge
from cp import tables
from cp.block import BlockBench
from cp.replay import Tape, TapedManager

from megatron_dsv.context_parallel import cluster, trial_block
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.cost_model import Handling
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.trial_block import TrialBlock, TrialShape, make_inputs
from megatron_dsv.kernels.block_scores.api import block_scores
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.testing.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = TrialShape(128, 2, 8, 64, q_block=8, kv_block=8)
CALIBRATION = Calibration(cluster.load("h200x2"), CalibratedKernels(*(Line(1e6, 1.0),) * 5), Handling(), 8, 8, 8)
ROW_KEYS = {"case", "tokens", "sparsity", "plan", "measured_ms", "predicted_ms", "exposed_comm_ms",
            "mib_per_communicator", "peak_gib"}


@dataclass(frozen=True)
class ForgetfulKernels(Kernels):
    """Loses a part of the keys' gradients wherever only a part of the keys was at hand."""

    def backward(self, dout, q, k, v, out, lse, keys, softmax_scale):
        grads = super().backward(dout, q, k, v, out, lse, keys, softmax_scale)
        if grads is not None and q.shape[0] < SHAPE.tokens:
            grads[1][:8] = 0
        return grads


def bench(kernels, said):
    return BlockBench(SHAPE, CALIBRATION, dist.group.WORLD, CPU, torch.float32, kernels, 0.001, said.append)


def run_case(tmp_path, kernels, sparsity):
    said = []
    made = bench(kernels, said)
    arms = made.arms(sparsity)
    path = tmp_path / f"predictions{dist.get_rank()}.json"
    made.write_predictions(arms, path)
    return made.measure(arms, None), made.failures, json.loads(path.read_text())


def test_single_tokens_are_selected_as_a_run_selects_them(monkeypatch):
    shape = replace(SHAPE, kv_block=1)
    block = TrialBlock(shape, make_inputs(shape, CPU, torch.float32), None, budgets=(40, 128))
    q_lr, k_lr = (torch.randn(rows, 1, 2, shape.rank) for rows in (3 * shape.proxies, shape.tokens))
    scores = block_scores(q_lr, k_lr, kv_block_size=1, proxies=shape.proxies)
    expected = select(scores, rule="topk", num_kv_heads=2, num_queries=24, num_keys=shape.tokens, q_block_size=8,
                      kv_block_size=1, head_budgets=[40, 128], query_length=shape.tokens,
                      query_group_ids=torch.tensor([1, 5, 9]))
    monkeypatch.setattr(trial_block, "chunked_block_scores", lambda *_, **__: pytest.fail("all scores of tokens"))
    got = block.select(q_lr, k_lr, range(2), (1, 5, 9))
    assert torch.equal(got.block_mask(), expected.block_mask())
    assert torch.equal(got.row_start < 0, expected.row_start < 0)


def test_every_arm_is_predicted_checked_and_timed(tmp_path):
    for sparsity, plans in ((None, ["one GPU", "(1, 2) gather", "(2, 1) none"]),
                            (0.75, ["one GPU", "(1, 2) selective", "(2, 1) none"])):
        (rows, failures, predictions), other = run_ranks(run_case, 2, tmp_path, Kernels(), sparsity)
        assert failures == []
        assert [row["plan"] for row in rows][:3] == plans
        assert len(rows) == (3 if sparsity is None else 4)
        assert [row["predicted_ms"] for row in predictions["rows"]] == pytest.approx(
            [row["predicted_ms"] for row in rows], abs=1e-3)
        for row in rows:
            assert set(row) > ROW_KEYS
            assert row["measured_ms"] > 0
            assert (row["exposed_comm_ms"] is None) == (row["plan"] == "one GPU")
        # Times are the slowest rank's on both.
        assert [row["measured_ms"] for row in other[0]] == [row["measured_ms"] for row in rows]


def test_a_wrong_arm_has_no_numbers(tmp_path):
    rows, failures, _ = run_ranks(run_case, 2, tmp_path, ForgetfulKernels(), 0.5)[0]
    assert [row["plan"] for row in rows if row["plan"].startswith("(1, 2)")] == []
    assert any("gate of sparsity 0.5, (1, 2)" in failure and "dk" in failure for failure in failures)
    assert "one GPU" in [row["plan"] for row in rows]


def replayed():
    tape = Tape()
    manager = TapedManager(dist.group.WORLD, node_ranks=2, tape=tape)
    split = Split(1, 2)
    manager.prepare([split])
    group, rank = manager.sequence_group(split), dist.get_rank()
    sent = torch.arange(4.0) + 10 * rank
    results = []
    for mode in (tape.record, tape.replay, tape.replay, tape.live):
        mode()
        results.append([group.exchange_evenly(sent.view(2, 2) + step, f"step {step}") for step in range(2)])
    tape.replay()
    with pytest.raises(RuntimeError, match=r"recorded step 0 of .*, replayed step 1 of"):
        group.exchange_evenly(sent.view(2, 2), "step 1")
    return [torch.stack(row) for row in results]


def test_a_replay_delivers_what_was_recorded():
    for results in run_ranks(replayed, 2):
        for later in results[1:]:
            assert torch.equal(results[0], later)
        assert results[0].unique().numel() > 4


def test_rows_merge_by_case(tmp_path):
    path = tmp_path / "cp.json"
    row = {"case": "block", "tokens": 128, "sparsity": 0.5, "plan": "planned (2, 1) heads [0]", "measured_ms": 1}
    merge(path, [row, row | {"sparsity": 0.0, "plan": "one GPU"}])
    merge(path, [row | {"plan": "planned (2, 1) heads [1]", "measured_ms": 2}])
    kept = json.loads(path.read_text())
    assert [(r["sparsity"], r["plan"], r["measured_ms"]) for r in kept] == [
        (0.0, "one GPU", 1), (0.5, "planned (2, 1) heads [1]", 2)]
    assert all("torch" in r["versions"] for r in kept)


def test_the_tables_show_what_was_measured(tmp_path):
    document = tmp_path / "scaling.md"
    rows = [{"case": "block", "sparsity": 0.9, "plan": "planned (2, 1) none heads [[0], [1]]", "measured_ms": 68.153,
             "predicted_ms": 66.1, "error": 0.031, "exposed_comm_ms": 5.3, "peak_gib": 5.77, "dense_beside_ms": 412.9},
            {"case": "block", "sparsity": 0.0, "plan": "one GPU", "measured_ms": 843.0, "predicted_ms": 774.3,
             "error": 0.0888, "exposed_comm_ms": None, "peak_gib": 5.5, "dense_beside_ms": None}]
    document.write_text("a\n<!-- two GPUs, block: begin -->\nold\n<!-- two GPUs, block: end -->\nb\n")
    tables.write(document, rows)
    assert document.read_text().splitlines()[2:] == [
        tables.HEADERS["block"], "|---|---|---|---|---|---|---|---|",
        "| 90% | planned (2, 1) | 68.2 | 66.1 | +3.1% | 5.3 | 5.8 | 412.9 |",
        "| dense | one GPU | 843.0 | 774.3 | +8.9% |  | 5.5 |  |", "<!-- two GPUs, block: end -->", "b"]
    with pytest.raises(ValueError, match="two GPUs, train: begin"):
        tables.write(document, [rows[0] | {"case": "train"}])
