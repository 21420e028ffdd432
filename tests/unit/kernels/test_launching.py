"""What a Triton launch refuses before it reaches the device, and the sizes that every op pads to."""

import pytest
import torch

from megatron_dsv.kernels import launching
from megatron_dsv.kernels.launching import (
    Launch,
    Tile,
    check_reach,
    check_triton,
    choose_or_log,
    kind_limit,
    padded_dim,
    power_of_two,
)


class _Kernel:
    """Notes the grids that it is launched with."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda **_: self.grids.append(grid)


def test_a_grid_that_no_device_takes_is_refused_and_an_empty_one_launches_nothing():
    kernel = _Kernel()
    for grid in ((70000,), (3, 65535), (0, 65536), (7, 0)):
        Launch(kernel, grid, {}, {}, Tile(1, 1, 1, 1)).run()
    assert kernel.grids == [(70000,), (3, 65535)]
    with pytest.raises(NotImplementedError, match=r"batch x heads up to 65535, got a grid of \(3, 65536\); split the"):
        Launch(kernel, (3, 65536), {}, {}, Tile(1, 1, 1, 1)).run()
    assert len(kernel.grids) == 2


def test_tokens_too_far_apart_for_32_bits_are_refused():
    def tokens(number, stride):
        return torch.empty_strided((number, 1, 1, 16), (stride, 16, 16, 1), device="meta")

    check_reach(1, tokens(9, 2**24 - 1), tokens(1, 2**40))
    check_reach(1024, tokens(9, 2**21 - 1))
    for reach, stride in ((1, 2**24), (128, 2**24), (1024, 2**21)):
        with pytest.raises(NotImplementedError, match=f"stride times {max(128, reach)} is below 2.31 elements, got a "
                                                      f"stride of {stride}; copy the tensor or use"):
            check_reach(reach, tokens(9, 16), tokens(2, stride))


def test_sizes_are_padded_to_powers_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1000)] == [1, 1, 2, 4, 4, 8, 1024]
    assert [padded_dim(n) for n in (1, 16, 17, 96, 256)] == [16, 16, 32, 128, 256]


def test_auto_and_an_explicit_request_have_one_limit_and_auto_says_once_what_it_took(monkeypatch, caplog):
    monkeypatch.setattr(launching, "interpreted", lambda: False)
    launching._log_choice.cache_clear()
    cuda, wide, mixed = torch.device("cuda"), torch.empty(1, 300), (torch.empty(1), torch.empty(1).half())
    limits = {"wide": lambda: kind_limit((wide,), widths="ranks"), "mixed": lambda: kind_limit(mixed, widths="ranks"),
              "double": lambda: kind_limit((wide.double(),), widths="ranks"), "fine": lambda: None}
    with caplog.at_level("INFO", logger=launching.__name__):
        chosen = [choose_or_log(op, "auto", cuda, limit) for op, limit in limits.items() for _ in range(2)]
        chosen.append(choose_or_log("host", "auto", torch.device("cpu"), pytest.fail))
    assert chosen == ["reference"] * 6 + ["triton"] * 2 + ["reference"]
    assert [message.replace("backend='auto' took ", "") for message in caplog.messages] == [
        "wide: 'reference' because triton takes ranks up to 256, got 300",
        "mixed: 'reference' because triton takes torch.bfloat16, torch.float16, torch.float32, queries as their keys, "
        "got torch.float32, torch.float16",
        "double: 'reference' because triton takes torch.bfloat16, torch.float16, torch.float32, got torch.float64",
        "fine: 'triton' because the tensors lie on a cuda device",
        "host: 'reference' because the tensors lie on a cpu device"]
    assert choose_or_log("wide", "triton", cuda, pytest.fail) == "triton"
    with pytest.raises(NotImplementedError, match="of wide takes ranks up to 256, got 300; use backend='reference'"):
        check_triton("wide", cuda, limits["wide"]())
    with pytest.raises(NotImplementedError, match=r"of fine needs CUDA tensors \(or TRITON_INTERPRET=1\), got cpu; u"):
        check_triton("fine", torch.device("cpu"), None)
