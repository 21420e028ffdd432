"""Where a run's costs come from, and what is said when the flags cannot be served."""

import argparse
import re

import pytest

from megatron_dsv import presets
from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel import cluster as clusters
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.cost_model import Handling
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.training.cp_costs import costs_of, replanner_of
from megatron_dsv.training.flag_relations import _check_planning


def calibration() -> Calibration:
    lines = [Line(100.0, 1e-6 * number) for number in range(1, 6)]
    return Calibration(clusters.load("h800"), CalibratedKernels(*lines), Handling(), 64, 64, 128)


def test_a_run_says_whose_constants_it_plans_with(tmp_path):
    at_home = costs_of(DSVConfig(), device="NVIDIA H200", head_dim=128)
    assert at_home.source == "the constants of h200"
    foreign = costs_of(DSVConfig(), device=None, head_dim=128)
    assert foreign.source == "the constants of h200, which this CPU is not; give --dsv-cp-cluster or " \
        "--dsv-cp-calibration"
    assert foreign.digest == at_home.digest
    chosen = costs_of(DSVConfig(dsv_cp_cluster="h800"), device=None, head_dim=128)
    assert chosen.source == "the constants of h800"
    assert chosen.model.cluster == clusters.load("h800")
    assert chosen.model.memory_bytes == clusters.load("h800").memory_gib * 2**30 / 4
    file = tmp_path / "calibration.json"
    calibration().save(file)
    measured = costs_of(DSVConfig(dsv_cp_calibration=str(file)), device=None, head_dim=128)
    assert measured.model.kernels == calibration().kernels
    assert measured.source == f"the calibration {file}"
    both = costs_of(DSVConfig(dsv_cp_calibration=str(file), dsv_cp_cluster="h200"), device=None, head_dim=128)
    assert (both.digest, both.source) == (measured.digest, f"{measured.source}, not --dsv-cp-cluster h200")
    assert len({at_home.digest, chosen.digest, measured.digest}) == 3


def test_attention_takes_a_share_of_the_memory_that_is_there(tmp_path):
    file = tmp_path / "calibration.json"
    calibration().save(file)
    for flags, described in (({}, 139), ({"dsv_cp_cluster": "h800"}, 79), ({"dsv_cp_calibration": str(file)}, 79)):
        for device, least in ((None, described), (64 * 2**30, 64), (192 * 2**30, described)):
            costs = costs_of(DSVConfig(**flags), device="NVIDIA H200", head_dim=128, device_bytes=device)
            assert costs.model.memory_bytes == least * 2**30 / 4


def test_what_cannot_be_read_names_the_flag(tmp_path):
    file = tmp_path / "calibration.json"
    calibration().save(file)
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(presets.path("cluster/h200").read_text().replace("NVIDIA H200", "B9"))
    for flags, message in (
            ({"dsv_cp_cluster": str(unknown)}, "--dsv-cp-cluster: cluster unknown: gpu must be a device whose kernels "
             "were measured, NVIDIA H200, got 'B9'; name one, with its kernel-speed, or calibrate"),
            ({"dsv_cp_cluster": "b200"}, "--dsv-cp-cluster: no cluster 'b200'; clusters: "),
            ({"dsv_cp_calibration": "none.json"}, "--dsv-cp-calibration: calibration none.json: cannot be read"),
            ({"dsv_cp_calibration": str(file), "dsv_q_block_size": 32}, "--dsv-cp-calibration: the calibration was "
             "measured with query groups of 64, key blocks of 64 and heads of 128, the job has 32, 64 and 128")):
        with pytest.raises(ValueError, match=re.escape(message)):
            costs_of(DSVConfig(**flags), device=None, head_dim=128)


def test_windows_are_planned_without_the_time_of_a_selection():
    def problem(**flags):
        dsv = DSVConfig(**flags)
        return replanner_of(costs_of(dsv, device=None, head_dim=64), dsv, topo=Topology(2), buckets=((1, 1024),),
                            micro_batch=1, heads=4, groups=4, head_dim=64).problems[0][1]

    predicted, windows = problem(), problem(dsv_attention="window-1/3", dsv_sparse_stage="dense")
    assert predicted.model.kernels.select(1024, 1024, 2) > windows.model.kernels.select(1024, 1024, 2) == 0
    for time, *more in (("dense",), ("sparse", 0.1)):
        assert getattr(windows.model.kernels, time)(1024, 1024, 2, 64, *more) == \
            getattr(predicted.model.kernels, time)(1024, 1024, 2, 64, *more)
    assert (predicted.shape.predictor_rank, windows.shape.predictor_rank) == (16, 1)


def test_planning_flags_need_planning():
    with pytest.raises(ValueError, match="--dsv-cp-calibration needs --dsv-cp-plan planned, got heads; drop one"):
        DSVConfig(dsv_cp_calibration="x", dsv_cp_plan="heads").validate()
    with pytest.raises(ValueError, match="--dsv-cp-replan-interval must be an integer, at least 1, got 0"):
        DSVConfig(dsv_cp_replan_interval=0).validate()
    args = argparse.Namespace(context_parallel_size=1, dsv_cp_cluster=None, dsv_cp_calibration=None,
                              dsv_cp_replan_interval=5)
    with pytest.raises(ValueError, match="--dsv-cp-replan-interval needs --context-parallel-size above 1, got 1"):
        _check_planning(args)
    # The machines are what they are, whatever the plan.
    DSVConfig(dsv_cp_cluster="h200", dsv_cp_plan="heads").validate()
    _check_planning(argparse.Namespace(context_parallel_size=1, dsv_cp_cluster="h200", dsv_cp_calibration=None,
                                       dsv_cp_replan_interval=None))
    assert DSVConfig(dsv_cp_correction=True, dsv_deterministic=True).corrects_costs is False
