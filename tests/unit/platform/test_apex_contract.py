"""What Megatron takes from apex, given by a stand-in with apex's documented interfaces, and packages that only look so.

Each case is a process of its own: what is importable decides when Megatron is first imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import RunLog, run_pretrain

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's kernels are plain torch on the CPU")

APEX = {
    "apex/__init__.py": "",
    "apex/optimizers.py": '''
import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False):
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), t = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(p.data).float()
                m, v = state["exp_avg"], state["exp_avg_sq"]
                g = p.grad if self.adam_w_mode else p.grad + group["weight_decay"] * p
                m.mul_(b1).add_(g, alpha=1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                if self.adam_w_mode:
                    update += group["weight_decay"] * p
                p.add_(update, alpha=-group["lr"])


class FusedSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
                 wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
''',
    "apex/multi_tensor_apply.py": '''
class MultiTensorApply:
    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        CALLS.append(op.__name__)
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


CALLS = []
multi_tensor_applier = MultiTensorApply(2048 * 32)
''',
    "amp_C.py": '''
import torch


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    norms = torch.stack([t.float().norm() for t in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists):
        target.copy_(source * scale)
''',
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNormAffineFunction: ...\n",
    "apex/contrib/__init__.py": "",
    "apex/contrib/layer_norm/__init__.py": "",
    "apex/contrib/layer_norm/layer_norm.py": "class FastLayerNormFN: ...\n",
}
UNRELATED_APEX = {"apex/__init__.py": "def make_application(global_config, **settings): ...\n"}
OLD_TRANSFORMER_ENGINE = {"transformer_engine/__init__.py": "__version__ = '0.12.0'\n",
                          "transformer_engine/pytorch/__init__.py": ""}

RUN = """
import json, sys
from megatron_dsv.cli.main import main
from megatron_dsv.platform import compat, cpu
from megatron_dsv.testing.pretrain import run_pretrain
log = run_pretrain(sys.argv[1:], keep_state=True)
doctor = main(["doctor"])
cpu.enable()
compat.apply()
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
print(json.dumps({
    "losses": log.loss("loss"), "norms": log.grad_norms, "doctor": doctor,
    "weights": sum(float(value.double().abs().sum()) for value in log.states[0].values()),
    "adam": [optimizer.Adam.__module__, distrib_optimizer.Adam.__module__],
    "torch": optimizer.USING_PYTORCH_OPTIMIZER, "apex or te": distrib_optimizer.HAVE_APEX_OR_TE,
    "apex": distrib_optimizer.USING_APEX_OPTIMIZER, "te": distrib_optimizer.USING_TE_OPTIMIZER,
    "norm": clip_grads.l2_norm_impl.__module__}))
"""


def install(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run_beside(folder: Path, argv: list[str]) -> tuple[dict, str]:
    """What RUN reports where the packages of ``folder`` are importable, and all that it printed."""
    done = python(folder, RUN, argv)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def python(folder: Path, code: str, argv: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code, *argv], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = write_latents(tmp_path_factory.mktemp("latents"), [(1, 4, 4)] * 4)
    return (f"--config model/debug --num-layers 2 --latent-data {folder} --train-iters 2 --micro-batch-size 1 "
            "--global-batch-size 1 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --clip-grad 0.01 "
            "--eval-iters 0 --latent-valid-samples 1 --log-interval 1 --num-workers 0 --dsv-q-block-size 16 "
            "--dsv-kv-block-size 16 --use-distributed-optimizer").split()


@pytest.fixture(scope="module")
def alone(argv):
    return run_pretrain(argv, keep_state=True)


def weights(log: RunLog) -> float:
    return sum(float(value.double().abs().sum()) for value in log.states[0].values())


def test_a_run_on_apex_takes_its_adam_and_computes_the_same(tmp_path, argv, alone):
    """Clipping is active and weights decay, so norm, scale and Adam all take part."""
    beside, _ = run_beside(install(tmp_path, APEX), argv)
    assert beside["adam"] == ["apex.optimizers"] * 2
    assert (beside["torch"], beside["apex or te"], beside["apex"], beside["te"]) == (False, True, True, False)
    assert beside["norm"] == "amp_C"
    assert len(beside["losses"]) == 2
    assert min(beside["norms"]) > 0.01
    assert beside["losses"] == pytest.approx(alone.loss("loss"), rel=1e-6)
    assert beside["norms"] == pytest.approx(alone.grad_norms, rel=1e-5)
    assert beside["weights"] == pytest.approx(weights(alone), rel=1e-6)


def test_the_unrelated_package_of_that_name_breaks_nothing(tmp_path, argv, alone):
    beside, printed = run_beside(install(tmp_path, UNRELATED_APEX), argv)
    assert beside["adam"] == ["megatron_dsv.platform.fused_adam"] * 2
    assert (beside["torch"], beside["apex or te"], beside["apex"], beside["te"]) == (False, True, True, False)
    assert (beside["losses"], beside["norms"]) == (alone.loss("loss"), alone.grad_norms)
    assert beside["weights"] == weights(alone)
    assert beside["doctor"] == 0
    (line,) = [line for line in printed.splitlines() if line.split()[1:2] == ["apex"]]
    assert line.startswith("broken")
    assert "an unrelated package of that name" in line
    assert "uninstall it" in line


def test_a_transformer_engine_that_megatron_cannot_load_is_one_line(tmp_path, argv):
    code = "import sys; from megatron_dsv.training.main import main; main(sys.argv[1:])"
    done = python(install(tmp_path, OLD_TRANSFORMER_ENGINE), code, [*argv, "--transformer-impl", "transformer_engine"])
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = done.stderr.strip().splitlines()
    assert "error: megatron-core cannot load the Transformer Engine installed here: install one that it" in line
