import pytest
import torch

from megatron_dsv.metrics import METRICS, Recorder, of_layer


def test_values_combine_as_the_table_says():
    recorder = Recorder()
    for value in (1.0, torch.tensor(2.0, requires_grad=True), torch.tensor([6.0], dtype=torch.bfloat16)):
        recorder.record("dsv/predictor_loss", value)
        recorder.record("dsv/predictor_skipped_layers", value)
        recorder.record("dsv/mfu", value)
    assert recorder.report() == {"dsv/predictor_loss": 3.0, "dsv/predictor_skipped_layers": 9.0, "dsv/mfu": 6.0}
    assert recorder.report() == {}


def test_layers_have_their_own_names():
    assert [of_layer("dsv/recall", layer) for layer in (3, 12)] == ["dsv/layer_003/recall", "dsv/layer_012/recall"]


def test_a_name_that_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match=r"got 'dsv/recal'; did you mean dsv/recall\?"):
        Recorder().record("dsv/recal", 1.0)
    with pytest.raises(ValueError, match="dsv/mfu is not logged by layer, got layer 2"):
        of_layer("dsv/mfu", 2)


def test_the_table_is_complete():
    for name, metric in METRICS.items():
        assert name.startswith("dsv/")
        assert metric.reduction in ("mean", "sum", "last")
        assert metric.unit
        assert len(metric.help) > 10
