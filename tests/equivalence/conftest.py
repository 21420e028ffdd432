"""Runs of the whole entry program on forked CPU ranks, from one small data set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import ENTRY, RunLog, run_pretrain

FLAGS = (
    "--config model/debug --latent-valid-samples 4 --eval-iters 1 --eval-interval 100 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 2e-3 --lr-decay-style constant --log-interval 1 --num-workers 0 --clip-grad 0.1 "
    "--dsv-q-block-size 16 --dsv-kv-block-size 16 --dsv-predictor-query-stride 8 --dsv-profile-interval 2 "
    "--dsv-dense-above 1.0 --num-layers 4 --hidden-size 48 --ffn-hidden-size 96"
).split()


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latents(tmp_path_factory.mktemp("latents"), [(3, 8, 12)] * 12)


@pytest.fixture(scope="session")
def mixed_latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shapes, neither a multiple of the cube; one of them odd."""
    return write_latents(tmp_path_factory.mktemp("mixed"), [(3, 8, 12)] * 8 + [(5, 13, 3)] * 8 + [(1, 7, 9)] * 8)


@pytest.fixture(scope="session")
def train(latents: Path) -> Callable[..., RunLog]:
    """train(flags, ranks, steps=..., data=..., main=...) -> RunLog; ``main`` may wrap the program to watch it."""

    def run(flags: str, ranks: int = 1, *, steps: int | None = 5, data: Path = latents, keep_state: bool = False,
            main: Any = ENTRY) -> RunLog:
        length = [] if steps is None else ["--train-iters", str(steps)]
        argv = [*FLAGS, "--latent-data", str(data), *length, *flags.split()]
        return run_pretrain(argv, ranks, keep_state=keep_state, main=main)

    return run
