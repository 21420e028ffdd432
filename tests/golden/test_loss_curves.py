"""Loss curves of 20 steps against stored ones, so that a change of the arithmetic cannot slip in unseen.

A change that is meant to move them: ``pytest tests/golden --regenerate-golden``, and say why in the commit.
"""

import json
import re
from pathlib import Path

import pytest

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import run_pretrain

STEPS = 20
TOLERANCE = 1e-4  # relative; sums differ in their last bits between processors and BLAS libraries
FLAGS = (
    f"--config model/debug --train-iters {STEPS} --latent-valid-samples 4 --eval-iters 2 --eval-interval {STEPS} "
    "--micro-batch-size 1 --global-batch-size 2 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 4 --lr-decay-style cosine "
    "--log-interval 1 --num-workers 0 --num-layers 2 --hidden-size 48 --ffn-hidden-size 96 --dsv-q-block-size 16 "
    "--dsv-kv-block-size 4 --dsv-predictor-query-stride 8 --dsv-predictor-lr 1e-2 --dsv-profile-interval 4 "
    "--dsv-profile-momentum 0.5 --dsv-gate-recall 0.4 --dsv-budget-mass 0.6 --dsv-dense-above 1.0"
).split()


@pytest.mark.parametrize("stage", ["dense", "auto"])
def test_curve(stage, tmp_path, request):
    data = write_latents(tmp_path / "latents", [(3, 8, 12)] * 8 + [(1, 7, 9)] * 8)
    log = run_pretrain([*FLAGS, "--dsv-sparse-stage", stage, "--latent-data", str(data)])
    text = "\n".join(log.output)
    got = {"loss": log.loss("loss"), "grad_norm": log.grad_norms, "validation": log.validation[-1][1]["loss"],
           "sparse_layers": [int(count) for count in re.findall(r"dsv/sparse_layers: (\d+)", text)]}
    for name in ("predictor_loss", "recall", "keep_ratio", "sparsity"):
        got[name] = [float(value) for value in re.findall(rf"dsv/{name}: ([\d.]+)", text)]
    path = Path(__file__).parent / f"{stage}.json"
    if request.config.getoption("--regenerate-golden", default=False):
        path.write_text(json.dumps(got, indent=1) + "\n")
        pytest.skip(f"wrote {path.name}")
    stored = json.loads(path.read_text())
    assert got["loss"] == pytest.approx(stored["loss"], rel=TOLERANCE)
    assert got["grad_norm"] == pytest.approx(stored["grad_norm"], rel=10 * TOLERANCE)
    assert got["sparse_layers"] == stored["sparse_layers"]
    for name in ("predictor_loss", "recall", "keep_ratio", "sparsity"):
        # As logged, with four digits; one block that flips moves a recall by less than the tolerance.
        assert got[name] == pytest.approx(stored[name], abs=5e-3), name
    assert got["validation"] == pytest.approx(stored["validation"], rel=TOLERANCE)


def test_the_curves_part_where_layers_go_sparse():
    """Otherwise the second curve would guard nothing that the first does not."""
    dense, auto = (json.loads((Path(__file__).parent / f"{stage}.json").read_text()) for stage in ("dense", "auto"))
    parted = [number for number in range(STEPS) if dense["loss"][number] != auto["loss"][number]]
    assert 4 < parted[0] < STEPS - 4
    assert auto["sparse_layers"][0] == 0
    assert auto["sparse_layers"][-1] == 2
    assert auto["predictor_loss"][-1] < auto["predictor_loss"][0]
    assert 0.4 < auto["recall"][-1] < 1
