"""The rank harness: results, collectives, and every way to fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dsv.testing.ranks import RankError, run_ranks


def test_results_come_by_rank_from_one_process_group():
    def reduce(offset: int) -> tuple[int, str, torch.Tensor]:
        value = torch.tensor([float(dist.get_rank() + offset)])
        dist.all_reduce(value)
        return dist.get_rank(), os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"], value

    results = run_ranks(reduce, 3, 10)
    assert [(rank, environment) for rank, environment, _ in results] == [(0, "0/3"), (1, "1/3"), (2, "2/3")]
    assert all(float(value) == 33.0 for _, _, value in results)


def test_autograd_works_in_ranks_after_it_ran_here():
    x = torch.ones(8, 8, requires_grad=True)
    (x @ x).sum().backward()

    def gradient() -> torch.Tensor:
        y = torch.ones(8, 8, requires_grad=True)
        (y @ y).sum().backward()
        return y.grad

    assert all(torch.equal(result, x.grad) for result in run_ranks(gradient, 2))


def test_an_exception_names_the_rank_and_ends_the_others():
    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("lost")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*in fail.*KeyError: 'lost'.*ranks \[0\] were still"):
        run_ranks(fail, 2, timeout=50)
    assert time.monotonic() - start < 20


def test_a_hang_shows_where():
    def hang() -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), src=0)

    with pytest.raises(RankError, match=r"(?s)rank 1 was not done after 3 s; its stack:.*in recv.*in hang"):
        run_ranks(hang, 2, timeout=3)


def test_a_killed_rank_is_reported():
    def die() -> None:
        os._exit(7)

    with pytest.raises(RankError, match="rank 0 failed:\nthe process died without a Python exception"):
        run_ranks(die, 1)


def test_what_a_rank_started_dies_with_it(tmp_path):
    def start_child() -> int:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    child = run_ranks(start_child, 1)[0]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_goes_to_the_given_folder(tmp_path):
    def speak() -> None:
        print(f"this is rank {dist.get_rank()}")

    run_ranks(speak, 2, output=tmp_path)
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)] == ["this is rank 0\n", "this is rank 1\n"]
