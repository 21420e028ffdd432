"""Host tables on the device: right values, one copy."""

import torch

from megatron_dsv.kernels.host_values import on_device

CPU = torch.device("cpu")


def test_values_arrive_once_and_new_ones_anew():
    first = on_device(((1, 2), (3, 4)), torch.int64, CPU)
    assert first.tolist() == [[1, 2], [3, 4]]
    assert on_device(((1, 2), (3, 4)), torch.int64, CPU) is first
    assert on_device(((1, 2), (3, 5)), torch.int64, CPU).tolist() == [[1, 2], [3, 5]]
    assert on_device(((1, 2), (3, 4)), torch.int32, CPU).dtype == torch.int32


def test_a_tensor_is_known_by_its_values():
    lengths = torch.tensor([[5], [7]])
    first = on_device(lengths, torch.int32, CPU)
    lengths[0] = 6
    assert first.tolist() == [[5], [7]]
    assert on_device(lengths, torch.int32, CPU).tolist() == [[6], [7]]


def test_autograd_may_save_what_inference_mode_made():
    with torch.inference_mode():
        made = on_device((41, 43), torch.int32, CPU)
    assert not made.is_inference()
