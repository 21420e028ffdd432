import pytest
import torch

from megatron_dsv.metrics import METRICS, Recorder


def test_values_combine_as_the_table_says():
    recorder = Recorder()
    for value in (1.0, torch.tensor(2.0, requires_grad=True), torch.tensor([6.0], dtype=torch.bfloat16)):
        recorder.record("dsv/predictor_loss", value)
        recorder.record("dsv/predictor_skipped_layers", value)
        recorder.record("dsv/mfu", value)
    assert recorder.report() == {"dsv/predictor_loss": 3.0, "dsv/predictor_skipped_layers": 9.0, "dsv/mfu": 6.0}
    assert recorder.report() == {}


def test_layers_have_their_own_names():
    recorder = Recorder()
    recorder.record("dsv/recall", 0.5)
    recorder.record("dsv/recall", 0.75, layer=3)
    recorder.record("dsv/recall", 0.25, layer=12)
    assert recorder.report() == {"dsv/recall": 0.5, "dsv/layer_003/recall": 0.75, "dsv/layer_012/recall": 0.25}


def test_a_name_that_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match=r"got 'dsv/recal'; did you mean 'dsv/recall'\?"):
        Recorder().record("dsv/recal", 1.0)
    with pytest.raises(ValueError, match="dsv/mfu is not recorded by layer, got layer 2"):
        Recorder().record("dsv/mfu", 1.0, layer=2)


def test_the_table_is_complete():
    for name, metric in METRICS.items():
        assert name.startswith("dsv/")
        assert metric.reduction in ("mean", "sum", "max", "last")
        assert metric.unit
        assert len(metric.help) > 10


def test_ranks_combine(monkeypatch):
    def double(tensor, op=None, group=None):
        assert group == "the group"
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    recorder = Recorder()
    for value in (1.0, 3.0):
        recorder.record("dsv/predictor_loss", value)
        recorder.record("dsv/predictor_skipped_layers", value)
        recorder.record("dsv/mfu", value)
    assert recorder.report("the group") == {
        "dsv/predictor_loss": 2.0, "dsv/predictor_skipped_layers": 8.0, "dsv/mfu": 3.0}
