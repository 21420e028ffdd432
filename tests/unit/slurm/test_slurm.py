import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dsv import presets
from megatron_dsv.training.arguments import dry_parse

SLURM = Path(__file__).resolve().parents[3] / "scripts" / "slurm"
EXPERIMENTS = [name for name in presets.names() if name.startswith("experiments/") and name != "experiments/demo"]


@pytest.mark.parametrize("name", ["pretrain.sbatch", "node.sh", "env/example.sh"])
def test_scripts_are_valid_bash(name):
    subprocess.run(["bash", "-n", str(SLURM / name)], check=True)


def dry_run(*flags, **environment):
    """The command of a launch that is printed and not tried: the environment is on no host."""
    done = subprocess.run([str(SLURM / "pretrain.sbatch"), *flags], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "HOME": "/home/user", "DRY_RUN": "1", **environment})
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "error: the launch is not tried" in done.stderr
    assert "/bin/python is not on this host; run it where it is" in done.stderr
    return shlex.split(done.stdout)


def test_the_launch_of_every_experiment_parses_at_128_ranks():
    for name in EXPERIMENTS:
        command = dry_run("--config", name)
        assert {"--nnodes=16", "--nproc-per-node=8", "--rdzv-backend=c10d"} <= set(command)
        entry = next(index for index, token in enumerate(command) if token.endswith("pretrain_video_dit.py"))
        assert Path(command[entry]).is_file()
        args = dry_parse(command[entry + 1:], 16 * 8)
        assert args.launch_gpus == 128
        assert args.load == args.save
        assert args.dsv_cp_cluster == "h800"
        assert args.exit_signal_handler
        assert args.exit_signal == signal.SIGUSR1


def test_flags_and_sites_reach_the_command(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("DSV_VENV=/opt/dsv DSV_DATA=/data/latents DSV_RUNS='/runs of us' "
                    "DSV_CLUSTER=/site/ours.yaml\n")
    command = dry_run("--config", "experiments/dsv-30b", "--lr", "2e-4", DSV_ENV=str(site), SLURM_JOB_NUM_NODES="4",
                      SLURM_GPUS_ON_NODE="4", DSV_RUN="mine")
    assert command[0] == "/opt/dsv/bin/torchrun"
    assert {"--nnodes=4", "--nproc-per-node=4"} <= set(command)
    assert command[command.index("--save") + 1] == "/runs of us/mine/checkpoints"
    assert command[command.index("--dsv-cp-cluster") + 1] == "/site/ours.yaml"
    assert command[-4:] == ["--config", "experiments/dsv-30b", "--lr", "2e-4"]


def test_a_site_without_a_cluster_leaves_it_to_the_configuration(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("DSV_VENV=/opt/dsv DSV_DATA=/data/latents DSV_RUNS=/runs\n")
    assert "--dsv-cp-cluster" not in dry_run("--config", "experiments/dsv-30b", DSV_ENV=str(site))


def refused(*flags, **environment):
    done = subprocess.run([str(SLURM / "pretrain.sbatch"), *flags], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "HOME": "/home/user", **environment})
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_launch_without_a_model_is_refused():
    for flags in ((), ("--lr", "1e-4"), ("--config-dir", "x")):
        message = refused(*flags, DRY_RUN="1")
        assert "a model is required: add --config" in message
        assert message.count("\n") == 1
    assert dry_run("--config=experiments/dsv-30b")[-1] == "--config=experiments/dsv-30b"


def test_without_slurm_nothing_is_created(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text(f"DSV_VENV=/opt/dsv DSV_DATA=/data DSV_RUNS={tmp_path / 'runs'}\n")
    assert "it runs under Slurm: use sbatch" in refused("--config", "experiments/dsv-30b", DSV_ENV=str(site))
    assert list(tmp_path.iterdir()) == [site]


def test_a_launch_that_was_tried_and_can_run_ends_well(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho tried \"$@\"\n")
    python.chmod(0o755)
    site = tmp_path / "site.sh"
    site.write_text(f"DSV_VENV={tmp_path} DSV_DATA=/data DSV_RUNS={tmp_path / 'runs'}\n")
    done = subprocess.run([str(SLURM / "pretrain.sbatch"), "--config", "experiments/dsv-30b"], capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"], "DRY_RUN": "1", "DSV_ENV": str(site)})
    assert done.returncode == 0
    assert done.stderr.startswith("tried ")
    assert "--dry-run --dry-run-gpus 128" in done.stderr
    assert shlex.split(done.stdout)[0] == f"{tmp_path}/bin/torchrun"


def test_the_dry_run_tries_the_launch(tmp_path):
    command = tmp_path / "bin" / "python"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} \"$@\"\n")
    command.chmod(0o755)
    site = tmp_path / "site.sh"
    site.write_text(f"DSV_VENV={tmp_path} DSV_DATA=/data DSV_RUNS={tmp_path / 'runs'}\n")
    message = refused("--config", "experiments/dsv-30b", "--tensor-model-parallel-size", "7", DRY_RUN="1",
                      DSV_ENV=str(site), PYTHONPATH=str(SLURM.parents[1]))
    assert message.splitlines()[-1].startswith("pretrain_video_dit.py: error: --tensor-model-parallel-size must")


WORKER = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "agent":
    os.environ["TORCHELASTIC_RUN_ID"] = "x"
    sys.exit(subprocess.Popen([sys.executable, __file__, "worker"]).wait())
from megatron_dsv.platform.child_processes import end_with_launcher
end_with_launcher()
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
open(sys.argv[0] + ".ready", "w").close()
deadline = time.monotonic() + 20
while not asked and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.2)
open(sys.argv[0] + ".saved", "w").close()
sys.exit(0 if asked else 9)
"""


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_lets_the_workers_save_and_exit_cleanly(tmp_path, sent, to_all):
    """Whether Slurm signals the node's script alone or everything below it."""
    script, flag = tmp_path / "worker.py", tmp_path / "flag"
    script.write_text(WORKER)
    node = subprocess.Popen(["bash", str(SLURM / "node.sh"), str(flag), sys.executable, str(script), "agent"],
                            start_new_session=True, stderr=subprocess.DEVNULL,
                            env=os.environ | {"PYTHONPATH": str(SLURM.parents[1])})
    while not Path(f"{script}.ready").exists():
        assert node.poll() is None
        time.sleep(0.02)
    if to_all:
        os.killpg(node.pid, sent)
    else:
        node.send_signal(sent)
    assert node.wait(timeout=30) == 0
    assert Path(f"{script}.saved").exists()
    assert flag.read_text().strip() == sent.name.removeprefix("SIG")


def test_a_failing_command_keeps_its_status(tmp_path):
    done = subprocess.run(["bash", str(SLURM / "node.sh"), str(tmp_path / "flag"), sys.executable, "-c",
                           "import sys; sys.exit(7)"])
    assert done.returncode == 7
    assert not (tmp_path / "flag").exists()
