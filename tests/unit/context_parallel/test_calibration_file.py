"""Surcharges of blocks, and the file that a calibration is kept in."""

import dataclasses
import json

import pytest

from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.calibration import Calibration, Remainder, fit_surcharge
from megatron_dsv.context_parallel.cluster import Link
from megatron_dsv.context_parallel.cost_model import AttentionShape, CostModel, Handling, Surcharge
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line
from megatron_dsv.context_parallel.plan import Topology, even_block
from megatron_dsv.context_parallel.planner import Problem, evaluate
from megatron_dsv.context_parallel.statistics import BlockStats

KERNELS = CalibratedKernels(Line(1e4, 2e-7), Line(2e4, 5e-7), Line(3e4, 3e-7), Line(4e4, 8e-7), Line(5e4, 1e-6))
SHAPE = AttentionShape(8192, 1, 8, 1, 128)


def calibration(**changes) -> Calibration:
    handling = Handling(2000.0, 500.0, Surcharge(1e5, 0.5), Surcharge(2e5, 0.7, 1e-5), Surcharge(3e5, 0.2))
    made = Calibration(cluster.load("h200x2"), KERNELS, handling, 64, 64, 128, {"blocks": [{"ms": 1.0}]})
    return dataclasses.replace(made, **changes)


def remainders(surcharge, sizes):
    return [Remainder(rows, pairs, surcharge.fixed + surcharge.row * rows + surcharge.pair * pairs, 1e8)
            for rows, pairs in sizes]


def test_exact_remainders_give_the_surcharge():
    truth = Surcharge(3e5, 0.4, 2e-5)
    sizes = [(1e5, 1e9), (1e5, 4e9), (2e5, 4e9), (2e5, 9e9)]
    assert fit_surcharge(remainders(truth, sizes), of_pairs=True) == pytest.approx(truth, rel=1e-6)
    flat = truth._replace(pair=0.0)
    assert fit_surcharge(remainders(flat, sizes), of_pairs=False) == pytest.approx(flat, rel=1e-6)


def test_no_part_of_a_surcharge_is_negative():
    sizes = [(1e5, 1e9), (1e5, 4e9), (2e5, 4e9), (2e5, 9e9)]
    found = fit_surcharge(remainders(Surcharge(-5e5, 4.0, 2e-5), sizes), of_pairs=True)
    assert min(found) >= 0
    assert found.row > 0
    assert fit_surcharge(remainders(Surcharge(-5e5, 0.0, 0.0), sizes), of_pairs=True) == Surcharge()
    assert fit_surcharge([], of_pairs=True) == Surcharge()


@pytest.mark.parametrize(("split", "sparse", "part"), [
    (Split(2, 1), True, "heads"), (Split(2, 1), False, "heads"), (Split(1, 2), True, "rows"),
    (Split(1, 2), False, "keys")])
def test_a_blocks_time_holds_its_own_surcharge_alone(split, sparse, part):
    stats = BlockStats((0.25,) * 8, ((2, (0.5,) * 8),))
    plan = even_block(0, split, tp=1, units=8, sparse=sparse, kv_block=64)

    def total(handling):
        model = CostModel(cluster.load("h200x2"), KERNELS, 2**60, handling=handling)
        return evaluate(Problem(model, SHAPE, Topology(2, domain=2)), plan, stats).total

    bare = total(Handling())
    rows, kept = 8192 * 8 / 2, 0.25 if sparse else 1.0
    for name in ("heads", "rows", "keys"):
        more = total(Handling(**{name: Surcharge(7e5, 0.5, 1e-4)})) - bare
        expected = 7e5 + 0.5 * rows + 1e-4 * rows * 8192 * kept if name == part else 0
        assert more == pytest.approx(expected, abs=1)


def test_calibrated_kernels_are_lines_in_their_work():
    assert KERNELS.dense(1000, 2000, 3, 64) == (1e4 + 2e-7 * 384e6, 2e4 + 5e-7 * 384e6)
    assert KERNELS.sparse(1000, 2000, 3, 64, 0.5) == (3e4 + 3e-7 * 192e6, 4e4 + 8e-7 * 192e6)
    assert KERNELS.select(1000, 2000, 3) == 5e4 + 1e-6 * 6e6


def test_a_calibration_survives_its_file(tmp_path):
    path = tmp_path / "calibration.json"
    made = calibration()
    made.save(path)
    read = Calibration.load(path)
    assert read == made
    assert read.measured == made.measured
    assert read.digest == made.digest
    assert read.cost_model(1 << 40) == CostModel(made.cluster, KERNELS, 1 << 40, handling=made.handling)


@pytest.mark.parametrize(("measured", "taken"), [
    ({}, ()), ({"all_to_all": [{"link": "node"}], "first_communicator_mib": None}, ("node_link", "overlap")),
    ({"all_to_all": [{"link": "network"}], "first_communicator_mib": 900.0},
     ("network", "overlap", "communicator_mib"))])
def test_another_cluster_takes_what_was_measured_and_keeps_the_rest(measured, taken):
    other = cluster.load("h800")
    found = dataclasses.replace(cluster.load("h200"), node_link=Link(1.0, 2.0), network=Link(3.0, 4.0), overlap=0.123,
                                communicator_mib=7)
    assert calibration(cluster=found, measured=measured).applied_to(other) == dataclasses.replace(
        other, **{name: getattr(found, name) for name in taken})


def test_the_digest_is_of_every_constant():
    same = calibration().digest
    assert calibration(measured={}).digest == same
    assert calibration(handling=Handling()).digest != same
    assert calibration(cluster=cluster.load("h200")).digest != same
    assert calibration(kernels=dataclasses.replace(KERNELS, selection=Line(0.0, 1.0))).digest != same


def test_files_that_are_no_calibration(tmp_path):
    path = tmp_path / "calibration.json"
    with pytest.raises(ValueError, match=r"calibration.json: cannot be read: No such file"):
        Calibration.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"calibration.json: is not JSON"):
        Calibration.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be of schema 1; run `dsv bench --calibrate` again"):
        Calibration.load(path)
    calibration().save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"cluster": data["cluster"] | {"overlap": 0.9}}))
    with pytest.raises(ValueError, match="was changed by hand"):
        Calibration.load(path)
    del data["handling"]["rows"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="has fields that schema 1 does not: 'rows'"):
        Calibration.load(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": []}))
    with pytest.raises(ValueError, match="has fields that schema 1 does not"):
        Calibration.load(path)


def test_a_calibration_serves_what_it_was_measured_at():
    calibration().check(q_block=64, kv_block=64, head_dim=128)
    with pytest.raises(ValueError, match="heads of 128, the job has 64, 1 and 96; run `dsv bench --calibrate`"):
        calibration().check(q_block=64, kv_block=1, head_dim=96)


@pytest.mark.parametrize("line", [Line(float("nan"), 1.0), Line(1e4, float("inf")), Line(-1e4, 1.0), Line("a", "b")])
def test_constants_that_no_time_can_have_are_refused(tmp_path, line):
    file = tmp_path / "calibration.json"
    calibration(kernels=dataclasses.replace(KERNELS, selection=line)).save(file)
    with pytest.raises(ValueError, match="its constants must be numbers of at least 0, got"):
        Calibration.load(file)
