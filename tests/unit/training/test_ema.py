"""The EMA's recurrence; what it does in a run is shown in tests/distributed/test_platform.py."""

import pytest
import torch

from megatron_dsv.training.ema import WeightEma


def test_ema_follows_its_recurrence():
    ema, param = WeightEma(0.5), torch.tensor([2.0, -1.0])
    ema.of(param)
    expected = param.double()
    for n in range(8):
        param.add_(torch.tensor([1.0, 0.25]))
        ema.update([param])
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * param.double()
    torch.testing.assert_close(ema.of(param).double(), expected, rtol=1e-6, atol=0)
    assert ema.updates == 8


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_ema_decay_is_checked(decay):
    with pytest.raises(ValueError, match=rf"--ema-decay must be in \[0, 1\), got {decay}"):
        WeightEma(decay)
