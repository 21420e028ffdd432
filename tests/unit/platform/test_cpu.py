"""CUDA's stand-ins on a host without it."""

import pytest
import torch

from megatron_dsv.platform import cpu
from megatron_dsv.testing.ranks import run_ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host without CUDA")
def test_cuda_devices_are_the_cpu():
    def look() -> dict[str, object]:
        cpu.enable()
        cpu.enable()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        x = torch.arange(3, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            y = x.cuda() + torch.tensor([1], device=torch.cuda.current_device()).to("cuda:0", torch.int64)
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.randn(2, device="cuda")
        torch.cuda.set_rng_state(state)
        return {
            "sum": y.tolist(), "device": str(y.device), "type": torch.ones(1).type(),
            "cast": x.type(torch.float64).dtype, "same": torch.equal(first, torch.randn(2)),
            "time": start.elapsed_time(end) >= 0,
            "available": torch.cuda.is_available(),
        }

    assert run_ranks(look, 1)[0] == {
        "sum": [1, 2, 3], "device": "cpu", "type": "torch.cuda.FloatTensor", "cast": torch.float64,
        "same": True, "time": True, "available": False,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host without CUDA")
def test_nothing_changes_before_it_is_enabled():
    assert torch.cuda.device_count() == 0
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
