"""With selections left free, layouts round scores differently and a few blocks flip: how many, and what it costs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dsv.training.main import main

SPARSE = ("--num-layers 2 --global-batch-size 2 --eval-iters 0 --dsv-kv-block-size 4 --dsv-sparse-stage sparse "
          "--dsv-keep-ratio 0.4")
LAYOUTS = {"tp2": "--tensor-model-parallel-size 2", "pp2": "--pipeline-model-parallel-size 2"}
STEPS = 3


class Recording:
    """The program, writing the block masks [b, h, Nq, Nk] that each rank selected, in order, to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, argv: list[str]) -> None:
        from megatron_dsv.context_parallel.local import LocalScheme

        masks: list[torch.Tensor] = []
        begin = LocalScheme.begin

        def recording(self: LocalScheme, *args: Any) -> Any:
            pending = begin(self, *args)
            masks.append(pending.selection.block_mask())
            return pending

        LocalScheme.begin = recording  # type: ignore[method-assign]
        main(argv)
        torch.save(masks, self.folder / f"{torch.distributed.get_rank()}.pt")

    def masks(self, layout: str) -> torch.Tensor:
        """bool [steps x micro-batches, layers, b, heads, Nq, Nk] of the whole model."""
        ranks = [torch.stack(torch.load(path)) for path in sorted(self.folder.glob("*.pt"))]
        if layout == "tp2":
            return torch.cat(ranks, dim=2).unflatten(0, (-1, 2))
        if layout == "pp2":
            return torch.stack(ranks, dim=1)
        return ranks[0].unflatten(0, (-1, 2))


@pytest.fixture(scope="module")
def start(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    train(f"{SPARSE} --save {folder} --save-interval 2", steps=2)
    return folder


@pytest.fixture(scope="module")
def one_rank(train, start, tmp_path_factory):
    recording = Recording(tmp_path_factory.mktemp("one"))
    return train(f"{SPARSE} --load {start}", steps=2 + STEPS, main=recording), recording.masks("one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_blocks_flip(train, start, one_rank, tmp_path, layout):
    recording = Recording(tmp_path)
    log = train(f"{SPARSE} --load {start} {LAYOUTS[layout]}", 2, steps=2 + STEPS, main=recording)
    expected, wanted = one_rank
    got = recording.masks(layout)
    assert got.shape == wanted.shape == (STEPS * 2, 2, 1, 4, 5, 20)
    selected, flipped = int(wanted.sum()), int((got & ~wanted).sum())
    message = f"{layout}: {flipped} of {selected} selected blocks flipped in {STEPS} steps"
    print(message)
    assert wanted.float().mean() < 0.6, "a selection of everything could not flip"
    assert int(got.sum()) == selected, "budgets are exact, so a block that comes in puts another one out"
    assert flipped < 0.01 * selected, message
    assert log.loss("loss") == pytest.approx(expected.loss("loss"), rel=1e-3), message
