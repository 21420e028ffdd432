"""Calibration measured on one rank and on two: constants that all ranks share and that explain their own rows."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.cost_model import Handling
from megatron_dsv.context_parallel.microbenchmarks import Microbenchmarks, Sizes
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.context_parallel.stopwatch import Stopwatch
from megatron_dsv.context_parallel.trial_block import TrialBlock, TrialShape, make_inputs
from megatron_dsv.testing.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = TrialShape(64, 2, 8, 64, q_block=8, kv_block=8)
# Payloads so far apart that the larger one takes longer on a busy host, too.
SIZES = Sizes(SHAPE, (64, 128), (0.25, 0.75), (2**10, 2**24), 0.005, torch.float32)


def calibrated():
    group = dist.group.WORLD if dist.is_initialized() else None
    return Microbenchmarks(SIZES, CPU, cluster.load("h200"), group).calibrate()


def test_one_rank_measures_kernels_and_leaves_links_alone():
    made = calibrated()
    assert made.cluster == cluster.load("h200")
    assert made.handling == Handling()
    assert (made.q_block, made.kv_block, made.head_dim) == (8, 8, 8)
    assert len(made.measured["blocks"]) == 6
    for line in vars(made.kernels).values():
        assert line.intercept >= 0
        assert line.intercept + line.slope > 0


def test_two_ranks_agree_on_everything():
    one, two = run_ranks(calibrated, 2)
    assert one.digest == two.digest
    assert one.measured == two.measured
    base = cluster.load("h200")
    assert one.cluster.node_link != base.node_link
    assert one.cluster.network == base.network
    assert 0 <= one.cluster.overlap <= 1
    assert one.handling.pack_gbps not in (0, Handling().pack_gbps)
    splits = [row["split"] for row in one.measured["blocks"]]
    assert splits.count([1, 2]) == splits.count([2, 1]) == 6
    # What a busy host measures may leave nothing to account for; test_calibration_file.py has rows that do.
    assert all(min(part.fixed, part.row, part.pair) >= 0 for part in
               (one.handling.heads, one.handling.rows, one.handling.keys))


def calibrated_between_nodes():
    made = Microbenchmarks(SIZES, CPU, cluster.load("h200"), dist.group.WORLD, node_ranks=1)
    return made.topo, made.calibrate()


def test_ranks_of_two_nodes_measure_the_network_and_explain_blocks_by_it():
    (topo, made), _ = run_ranks(calibrated_between_nodes, 2)
    base = cluster.load("h200")
    assert topo == Topology(2, domain=1)
    assert made.cluster.node_link == base.node_link
    assert made.cluster.network != base.network
    assert made.links == {"network"}


def test_nodes_of_different_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="every node of a calibration must run as many ranks, got 6 ranks in nodes of "
                                         "4"):
        Microbenchmarks(SIZES, CPU, cluster.load("h200"), SimpleNamespace(size=lambda: 6), node_ranks=4)


def test_trial_inputs_project_to_the_selection_asked_for():
    inputs = make_inputs(SHAPE, CPU, torch.float64)
    again = make_inputs(SHAPE, CPU, torch.float64)
    assert torch.equal(inputs.x, again.x)
    shares = [inputs.share(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([share.q for share in shares]), inputs.q)
    block = TrialBlock(SHAPE, inputs, Microbenchmarks(SIZES, CPU, cluster.load("h200"))._scheme(), (2, 5))
    selection = block.begin().selection
    assert selection.row_count[0].tolist() == [[2] * 8, [5] * 8]
    # Neighbours are wanted more than others: a group's own block always, and its rows are not all alike.
    mask = selection.block_mask()[0]
    assert bool(mask[:, range(8), range(8)].all())
    assert not bool((mask[1] == mask[1][:1]).all())


def test_a_stopwatch_counts_what_it_ran():
    calls = []

    def program(mark):
        mark()
        calls.append(1)
        mark()
        mark()

    times = Stopwatch(CPU).run({"a": program}, 0.0)["a"]
    assert len(times.rows) >= 1
    assert all(len(row) == 2 for row in times.rows)
    assert len(calls) > len(times.rows)
    assert times.total() >= times.stage(0)
