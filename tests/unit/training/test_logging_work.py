"""The arithmetic that a log line counts."""

import functools
from types import SimpleNamespace

import pytest

from megatron_dsv.config import DSVConfig
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.training.dsv_controller import LayerReport
from megatron_dsv.training.logging import _kept_shares
from megatron_dsv.training.run import TrainingRun

LAYOUT = TokenLayout((21, 30, 52), (4, 4, 4), 64)


def kept(attention: str, *layers: tuple[bool, float]) -> list[float] | None:
    reports = [LayerReport(number, sparse, 0.5, keep, 0.9) for number, (sparse, keep) in enumerate(layers, start=1)]
    run = SimpleNamespace(controller=SimpleNamespace(num_layers=3, step_reports=reports), step_layout=LAYOUT,
                          dsv=DSVConfig(dsv_attention=attention, dsv_sparse_stage="dense"))
    run.window_share = functools.partial(TrainingRun.window_share, run)
    return _kept_shares(run)


def test_a_window_reads_its_share_of_every_layer():
    # Whole blocks of 64 that touch the box: more than the 1/27 and 8/27 of its tokens.
    assert kept("window-1/3") == pytest.approx([0.0792] * 3, abs=1e-4)
    assert kept("window-2/3") == pytest.approx([0.4151] * 3, abs=1e-4)


def test_dense_layers_read_everything():
    assert kept("predicted") is None
    assert kept("predicted", (False, 0.1), (True, 0.2), (False, 0.3)) == [1.0, 0.2, 1.0]
