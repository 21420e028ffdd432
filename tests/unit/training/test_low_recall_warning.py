"""A run that is sparse without a gate says so when its predictors have learned too little."""

import math

from megatron_dsv.config import DSVConfig
from megatron_dsv.training.dsv_controller import LayerReport
from megatron_dsv.training.logging import _rows, low_recall_warning


def _reports(*recalls: float, sparse: bool = True) -> list[LayerReport]:
    return [LayerReport(number, sparse, 0.5, 0.2, recall) for number, recall in enumerate(recalls, start=1)]


def test_far_below_the_gate():
    warning = low_recall_warning(DSVConfig(dsv_sparse_stage="sparse"), _reports(0.2, 0.5, math.nan))
    assert warning.startswith("warning: --dsv-sparse-stage sparse trains at a mean recall of 0.35, far below "
                              "--dsv-gate-recall 0.9; auto ")
    assert low_recall_warning(DSVConfig(dsv_sparse_stage="sparse", dsv_gate_recall=0.5), _reports(0.35)) is None


def test_nothing_to_say():
    assert low_recall_warning(DSVConfig(dsv_sparse_stage="sparse"), _reports(0.75, 0.85)) is None
    assert low_recall_warning(DSVConfig(dsv_sparse_stage="sparse"), _reports(math.nan)) is None
    assert low_recall_warning(DSVConfig(dsv_sparse_stage="sparse"), _reports(0.2, sparse=False)) is None
    assert low_recall_warning(DSVConfig(dsv_sparse_stage="auto"), _reports(0.2)) is None


def test_what_was_not_measured_yet_does_not_read_like_a_diverged_run():
    assert _rows(_reports(math.nan, 0.5, sparse=False)) == (
        "\n   layer   1  dense   sparsity 0.500  keep 0.200  recall not measured"
        "\n   layer   2  dense   sparsity 0.500  keep 0.200  recall 0.500")
