import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.calibration import (
    AllToAllRow,
    all_to_all_row,
    digest,
    fit_line,
    fit_links,
)
from megatron_dsv.context_parallel.cluster import Link
from megatron_dsv.context_parallel.cost_model import CostModel
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.kernel_rates import ARTIFACT, MeasuredKernels
from megatron_dsv.context_parallel.plan import Topology

KERNELS = MeasuredKernels("NVIDIA H200", 64, 64)
MIB = 2**20
# Two H200 of one host, all_to_all_single: MB per rank, of which half are remote, and microseconds.
MEASURED = [AllToAllRow("node", 2, megabytes * 10**6 // 2, us) for megabytes, us in ((16, 62), (128, 257), (512, 915))]


@given(st.floats(0.1, 1e3), st.floats(1e-3, 1e3), st.lists(st.floats(1, 1e4), min_size=2, max_size=6, unique=True))
def test_points_on_a_line_give_the_line(intercept, slope, sizes):
    line = fit_line([(x, intercept + slope * x) for x in sizes])
    for x in sizes:
        assert line.at(x) == pytest.approx(intercept + slope * x, rel=1e-5)


def test_the_fit_is_the_least_sum_of_squared_relative_errors():
    points = [(1.0, 3.0), (2.0, 3.5), (8.0, 11.0), (20.0, 21.0)]

    def error(a, b):
        return sum(((a + b * x - y) / y) ** 2 for x, y in points)

    line = fit_line(points)
    least = error(*line)
    for step in (1e-3, -1e-3):
        assert least < error(line.intercept + step, line.slope)
        assert least < error(line.intercept, line.slope + step)


def test_neither_part_is_negative():
    through_origin = fit_line([(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)])
    assert through_origin.intercept == 0
    assert through_origin.slope == pytest.approx(sum((1, 2 / 3, 3 / 5)) / sum((1, 4 / 9, 9 / 25)))
    assert fit_line([(1.0, 5.0), (2.0, 4.0)]).slope == 0


def test_what_gives_no_line():
    with pytest.raises(ValueError, match="a line needs measurements at two sizes at least, got 1"):
        fit_line([(1.0, 2.0), (1.0, 3.0)])
    with pytest.raises(ValueError, match="measured times must be above 0"):
        fit_line([(1.0, 2.0), (2.0, 0.0)])


def test_the_h200_files_link_is_what_was_measured():
    h200 = cluster.load("h200")
    fitted = fit_links(h200, MEASURED)
    assert fitted.node_link.gbps == pytest.approx(h200.node_link.gbps, rel=0.05)
    assert fitted.network == h200.network
    for row in MEASURED:
        link = h200.node_link
        assert link.latency_us + link.peer_us + row.remote_bytes / link.gbps / 1e3 == pytest.approx(row.us, rel=0.1)


@pytest.mark.parametrize(("ranks", "node_ranks"), [(16, 8), (16, 1), (4, 2)])
def test_rows_between_nodes_give_the_network_back_that_the_model_charges(ranks, node_ranks):
    """An all-to-all over nodes of a made-up network: only what leaves a node took its time."""
    base = dataclasses.replace(cluster.load("h200"), gpus_per_node=node_ranks)
    truth = dataclasses.replace(base, network=Link(20.0, 30.0, base.network.peer_us))
    payloads = [ranks * MIB, 4 * ranks * MIB, 64 * ranks * MIB]
    split, topo = Split(1, ranks), Topology(ranks, domain=node_ranks)

    def us(found, payload):
        model = CostModel(found, KERNELS, 2**60)
        return model._latency_us(topo, split, False) + payload * model._ns_per_byte(topo, split, of_heads=False) / 1e3

    fitted = fit_links(base, [all_to_all_row(ranks, node_ranks, size, us(truth, size)) for size in payloads])
    assert dataclasses.astuple(fitted.network) == pytest.approx(dataclasses.astuple(truth.network), rel=1e-4)
    assert fitted.node_link == base.node_link
    assert all_to_all_row(node_ranks, node_ranks, MIB, 5.0) == AllToAllRow("node", node_ranks, MIB, 5.0)


def test_bad_rows_of_links():
    h200 = cluster.load("h200")
    with pytest.raises(ValueError, match="link must be one of node, network, got 'pcie'"):
        fit_links(h200, [AllToAllRow("pcie", 2, MIB, 5.0)])
    with pytest.raises(ValueError, match="link node must be measured at sizes that take longer"):
        fit_links(h200, [AllToAllRow("node", 2, MIB, 50.0), AllToAllRow("node", 2, 2 * MIB, 40.0)])


def test_the_artifacts_kernels_are_the_fit_of_its_log():
    """Sparse forward and backward at 80 to 98% sparsity, 32,768 tokens, 16 heads of 128, in ms."""
    log = [(0.20, 9.25, 193.6), (0.15, 7.08, 147.9), (0.10, 4.90, 102.7), (0.05, 2.75, 57.4), (0.02, 1.31, 27.2)]
    for density, *measured in log:
        found = ARTIFACT.sparse(32768, 32768, 16, 128, density)
        assert [ns / 1e6 for ns in found] == pytest.approx(measured, rel=0.06)
    assert fit_line([(row[0], row[1]) for row in log]) == pytest.approx(ARTIFACT.sparse_forward_ms, rel=0.01)
    assert fit_line([(row[0], row[2]) for row in log]) == pytest.approx(ARTIFACT.sparse_backward_ms, rel=0.01)


def test_constants_have_a_digest():
    h200 = cluster.load("h200")
    kernels = MeasuredKernels("NVIDIA H200", 64, 64)
    same = digest(h200, kernels)
    assert digest(cluster.load("h200"), MeasuredKernels("NVIDIA H200", 64, 64)) == same
    assert digest(dataclasses.replace(h200, overlap=0.5), kernels) != same
    assert digest(h200, dataclasses.replace(kernels, speed=0.9)) != same
