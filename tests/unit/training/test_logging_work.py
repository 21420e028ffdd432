"""The arithmetic that a log line counts."""

from types import SimpleNamespace

import pytest

from megatron_dsv.config import DSVConfig
from megatron_dsv.training.dsv_controller import LayerReport
from megatron_dsv.training.logging import _kept_shares


def kept(attention: str, *layers: tuple[bool, float]) -> list[float] | None:
    reports = [LayerReport(number, sparse, 0.5, keep, 0.9) for number, (sparse, keep) in enumerate(layers, start=1)]
    return _kept_shares(SimpleNamespace(dsv=DSVConfig(dsv_attention=attention, dsv_sparse_stage="dense"), num_layers=3,
                                        layer_reports=reports))


def test_a_window_reads_its_share_of_every_layer():
    assert kept("window-1/3") == pytest.approx([1 / 27] * 3)
    assert kept("window-2/3") == pytest.approx([8 / 27] * 3)


def test_dense_layers_read_everything():
    assert kept("predicted") is None
    assert kept("predicted", (False, 0.1), (True, 0.2), (False, 0.3)) == [1.0, 0.2, 1.0]
