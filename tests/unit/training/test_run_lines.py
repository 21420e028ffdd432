"""What a run writes beside its metrics: a disk that takes no more costs these lines, not the run."""

import json
from types import SimpleNamespace

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.plan import Topology, even_plan
from megatron_dsv.context_parallel.plan_commit import Decision
from megatron_dsv.metrics import Recorder
from megatron_dsv.training import head_shares, plan_log, sparsity_trace
from megatron_dsv.training.plan_log import PlanLog
from megatron_dsv.training.sparsity_trace import SparsityTrace

PLAN = even_plan(Topology(2), layers=2, units=2, longest=64)


def test_lines_of_plans_that_cannot_be_written_cost_one_line(tmp_path, capsys):
    (tmp_path / "run").write_text("no folder")
    log = PlanLog(0, tmp_path / "run", Recorder())
    log.failed(PLAN, "why", 3)
    log.failed(PLAN, "why", 5)
    assert capsys.readouterr().out.splitlines() == [
        " no new plan at step 3, plan 0 stays in force: why",
        f" {tmp_path}/run/{plan_log.FILE} cannot be written: File exists; the run goes on without its lines",
        " no new plan at step 5, plan 0 stays in force: why"]


def test_a_line_of_plans_that_was_cut_short_spoils_no_other(tmp_path):
    (tmp_path / plan_log.FILE).write_text('{"step": 1, "ev')
    PlanLog(0, tmp_path, Recorder()).failed(PLAN, "why", 3)
    torn, whole = (tmp_path / plan_log.FILE).read_text().splitlines()
    assert torn == '{"step": 1, "ev'
    assert json.loads(whole)["step"] == 3


def test_a_trace_that_cannot_be_written_costs_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(head_shares, "gather", lambda *args, **more: SimpleNamespace(kept=(((0.5,), (0.25,)),)))
    (tmp_path / "run").write_text("no folder")
    trace = SparsityTrace(tmp_path / "run", {}, layers=2, heads=1, model_group=None, device=torch.device("cpu"))
    trace.add(1, 64, {})
    trace.add(2, 64, {})
    assert capsys.readouterr().out == (f" {tmp_path}/run/{sparsity_trace.FILE} cannot be written: File exists; the run "
                                       "goes on without its lines\n")


def test_plans_of_windows_start_from_what_they_keep(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **more: None)
    layer = SimpleNamespace(dsv=DSVConfig(dsv_attention="window-1/3", dsv_sparse_stage="dense"),
                            selector=SimpleNamespace(query_heads=range(2)))
    shares = head_shares.gather({1: layer}, [64, 128], layers=1, heads=2, model_group=None,
                                device=torch.device("cpu"), windows=[0.5, 0.25])
    assert shares == head_shares.HeadShares((((0.5, 0.5),), ((0.25, 0.25),)), ((True,), (True,)))


def test_a_refused_plan_is_named_by_its_own_version(tmp_path, capsys):
    """Versions count the plans of a run, also those of an earlier launch that are in force no more."""
    PlanLog(0, tmp_path, Recorder()).decided(PLAN, PLAN, None, Decision(False, 0, "too large"), version=8, step=4,
                                             seconds=0.1)
    assert capsys.readouterr().out == " plan 8 at step 4 refused by rank 0, plan 0 stays in force: too large\n"
    (line,) = (tmp_path / plan_log.FILE).read_text().splitlines()
    assert json.loads(line)["refused"] == 8
