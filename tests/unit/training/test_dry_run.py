"""A launch is tried without ranks: what it would refuse, and what it would take."""

import re
from argparse import Namespace

import pytest

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.training import checkpoint_guard, dry_run
from megatron_dsv.training.arguments import HostError
from megatron_dsv.training.main import main


@pytest.fixture
def data(tmp_path):
    """Videos of 9 x 16 x 16 and 5 x 16 x 16 tokens."""
    return write_latents(tmp_path / "data", [(9, 32, 32)] * 3 + [(5, 32, 32)], text_dim=4096)


def flags(data, *more):
    return ["--config", "model/dsv-2.7b", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--bf16",
            "--latent-data", str(data), "--latent-valid-samples", "1", "--dry-run", *more]


def test_a_launch_that_fits_says_what_it_takes(data, capsys):
    dry_run.run(flags(data, "--dry-run-gpus", "8", "--tensor-model-parallel-size", "2", "--global-batch-size", "8",
                      "--use-distributed-optimizer", "--dsv-sparse-stage", "auto", "--dry-run-cluster", "h800"))
    out = capsys.readouterr().out
    assert "8 ranks = TP 2 x PP 1 x CP 1 x DP 4, global batch 8, stage auto" in out
    assert "checkpoint: none, the run starts from scratch" in out
    assert "1,280 tokens: 1 samples of 5x32x32 latents (padding 0.0%)" in out
    assert "2,304 tokens: 3 samples of 9x32x32 latents (padding 0.0%)" in out
    assert out.count("(predicted for h800 in bf16)") == 2
    assert re.search(r"0-31 +1 x 1 h_inner +dense", out)
    assert out.endswith("the launch can run\n")


def test_context_parallel_plans_keep_to_what_the_run_may_use(data, capsys):
    def splits(*more):
        dry_run.run(flags(data, "--dry-run-gpus", "4", "--context-parallel-size", "4", "--dsv-sparse-stage", "sparse",
                          "--dsv-keep-ratio", "0.1", *more))
        out = capsys.readouterr().out
        assert "4 ranks = TP 1 x PP 1 x CP 4 x DP 1" in out
        return set(re.findall(r"(\d x \d) [hs]_inner", out))

    assert splits("--dsv-cp-plan", "sequence") == {"1 x 4"}
    assert splits("--dsv-cp-plan", "heads") == {"4 x 1"}
    # Equal heads of a short sequence: nothing is worth an exchange of keys.
    assert splits() == {"4 x 1"}


def test_stages_of_different_lengths_and_windows_are_those_of_the_run(data, capsys):
    dry_run.run(flags(data, "--dry-run-gpus", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "2",
                      "--decoder-first-pipeline-num-layers", "15", "--dsv-sparse-stage", "dense", "--dsv-attention",
                      "window-1/3"))
    out = capsys.readouterr().out
    assert "2 ranks = TP 1 x PP 2 x CP 1 x DP 1" in out
    assert re.search(r"0-31 +1 x 1 h_inner +sparse +0\.117", out)  # whole blocks that touch 1/27 of the tokens
    assert "predictors" not in out
    assert not re.search(r"selection [1-9]", out)
    assert out.endswith("the launch can run\n")


def test_the_stage_in_which_predictors_learn_costs_their_time_and_memory(data, capsys):
    dry_run.run(flags(data, "--dry-run-gpus", "1", "--dsv-sparse-stage", "predictor", "--dsv-predictor-rank", "64"))
    out = capsys.readouterr().out
    assert re.search(r"0-31 +1 x 1 h_inner +dense", out)
    assert re.search(r"time, ms: .*predictors", out)
    # 32 layers of 2 x 16 heads x 64 x 2,049 parameters of 16 bytes.
    assert "predictors 2.0" in out.split("memory, GiB: ")[1]


def test_sharing_out_the_optimizer_is_seen_in_the_memory(data, capsys):
    def gib(*more):
        dry_run.run(flags(data, "--dry-run-gpus", "8", *more))
        return max(map(float, re.findall(r"memory ([\d.]+) of", capsys.readouterr().out)))

    apart, together = gib("--use-distributed-optimizer"), gib()
    # 2.7 billion parameters, 12 bytes each, of which seven eighths lie elsewhere.
    assert together - apart == pytest.approx(12 * 2.7e9 * 7 / 8 / 2**30, rel=0.15)


def test_how_layers_are_recomputed_is_seen_in_the_memory(data, capsys):
    def gib(*more):
        dry_run.run(flags(data, "--dry-run-gpus", "1", *more))
        return max(map(float, re.findall(r"memory ([\d.]+) of", capsys.readouterr().out)))

    def full(method, layers):
        return gib("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", layers)

    assert full("uniform", "1") < full("block", "16") < gib()


def test_a_launch_that_does_not_fit_ends_with_the_limit(data, capsys):
    argv = ["--config", "model/dsv-30b", *flags(data, "--dry-run-gpus", "2")[2:]]
    with pytest.raises(ValueError, match=r"TP 1 x PP 1 x CP 1 x DP 2 cannot run on h200: memory: \d+.\d GiB of 132.0 "
                                         r"that a GPU can use \(optimizer"):
        dry_run.run(argv)
    with pytest.raises(ValueError, match="--dry-run on h200: the number of GPUs must be at most one node, 8, or a "
                                         "multiple of it, got 12; name machines"):
        dry_run.run(flags(data, "--dry-run-gpus", "12"))


def test_it_ends_like_a_launch(data, capsys):
    main(flags(data, "--dry-run-gpus", "1"))
    assert capsys.readouterr().out.endswith("the launch can run\n")
    with pytest.raises(SystemExit) as caught:
        main(flags(data, "--dry-run-gpus", "1", "--lrr", "1"))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith("error: unknown flag --lrr; did you mean --lr?\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("more", "words"), [
    (["--dsv-sparse-stage", "auto", "--dsv-sparse-backend", "flash4"],
     "--dsv-sparse-backend flash4 takes query groups and key blocks of 128 tokens, got 64 and 64"),
    (["--dsv-deterministic", "--dsv-dense-backend", "sdpa", "--dry-run-cluster", "h800"],
     "--dsv-deterministic needs --dsv-dense-backend flash4 or reference, got sdpa"),
])
def test_kernels_that_cannot_serve_are_refused(data, more, words):
    with pytest.raises(NotImplementedError, match=words):
        dry_run.run(flags(data, "--dry-run-gpus", "1", *more))


def test_data_folders_and_checkpoints_are_looked_at(data, tmp_path):
    with pytest.raises(HostError, match="--latent-data must be a folder written by `dsv prepare`"):
        dry_run.run(flags(tmp_path / "none", "--dry-run-gpus", "1"))
    with pytest.raises(ValueError, match="--dit-text-dim must be the data set's 4096, got 32"):
        dry_run.run(flags(data, "--dry-run-gpus", "1", "--dit-text-dim", "32"))
    with pytest.raises(ValueError, match=r"--load must be the folder that a run .* does not exist"):
        dry_run.run(flags(data, "--dry-run-gpus", "1", "--load", str(tmp_path / "none")))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"--load .*iter_0000007 does not exist"):
        dry_run.run(flags(data, "--dry-run-gpus", "1", "--load", str(broken)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--save must be a folder, got .*, which is a file"):
        dry_run.run(flags(data, "--dry-run-gpus", "1", "--save", str(tmp_path / "file"), "--save-interval", "1"))


@pytest.mark.parametrize(("source", "more", "saved", "words"), [
    ("load", {}, True, "iter_0000007 of --load, of this model (left to the launch: "),
    ("load", {"ckpt_step": 5}, True, "iter_0000005 of --load, of this model (left"),
    ("load", {}, False, "iter_0000007 of --load, not compared with this model, as it does not say its flags (left to"),
    ("load", {"finetune": True}, True,
     "iter_0000007 of --load, compared with this model in its sizes alone, as its weights begin a run of their own (l"),
    ("pretrained_checkpoint", {"ckpt_step": 5}, True,
     "iter_0000005 of --pretrained-checkpoint, compared with this model in its sizes alone, as its weights begin a "),
])
def test_what_is_said_of_a_checkpoint_was_looked_at(tmp_path, monkeypatch, source, more, saved, words):
    for step in (5, 7):
        (tmp_path / f"iter_000000{step}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    monkeypatch.setattr(checkpoint_guard, "stored_shapes", lambda folder: {})
    monkeypatch.setattr(checkpoint_guard, "common_state", lambda folder: {"args": Namespace()} if saved else {})
    for name in ("check_sizes", "check_model"):
        monkeypatch.setattr(checkpoint_guard.model_identity, name, lambda *_: None)
    args = Namespace(**{"load": None, "pretrained_checkpoint": None, "ckpt_step": None, "finetune": False,
                        "no_load_optim": True, source: str(tmp_path)} | more)
    assert words in dry_run._checkpoint_line(args, checkpoint_guard.check_before_build(args))


@pytest.mark.parametrize(("more", "words"), [
    ({}, ", but nothing is left to train: the checkpoint holds iteration 60, and the last one is 60; raise --train"),
    ({"train_iters": 61}, ""),
    ({"skip_train": True}, ""),
    ({"train_iters": None, "train_samples": 243}, ", but nothing is left to train: the checkpoint holds iteration 60"),
    ({"train_iters": None, "train_samples": 244}, ""),
    ({"resumes": False}, ""),
])
def test_a_run_that_is_over_is_told_so(monkeypatch, tmp_path, more, words):
    (tmp_path / "iter_0000060").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("60")
    monkeypatch.setattr("megatron_dsv.training.checkpoint_files.common_state", lambda folder: {"iteration": 60})
    args = Namespace(**{"load": str(tmp_path), "pretrained_checkpoint": None, "ckpt_step": None, "skip_train": False,
                        "train_iters": 60, "train_samples": None, "global_batch_size": 4} | more)
    saved = Namespace(consumed_train_samples=240) if more.get("resumes", True) else None
    said = dry_run._nothing_left(args, saved)
    assert said.startswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(("argv", "environment", "ranks"), [
    (["--dry-run-gpus", "4"], {"WORLD_SIZE": "2"}, 4),
    (["--dry-run-gpus=4", "--lr", "1"], {}, 4),
    ([], {"WORLD_SIZE": "2", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}, 2),
    ([], {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}, 32),
    ([], {"SLURM_JOB_NUM_NODES": "4"}, None),
])
def test_the_number_of_ranks(argv, environment, ranks):
    assert dry_run.ranks_of(argv, environment) == ranks


def test_a_number_of_ranks_that_is_none():
    with pytest.raises(ValueError, match="--dry-run-gpus must be a whole number of at least 1, got '0'"):
        dry_run.ranks_of(["--dry-run-gpus", "0"], {})
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number of at least 1, got 'x'"):
        dry_run.ranks_of([], {"WORLD_SIZE": "x"})


def test_without_a_number_the_configuration_file_says_it(data, tmp_path, capsys):
    with pytest.raises(ValueError, match="a `gpus` key is required"):
        dry_run.run(flags(data))
    mine = tmp_path / "mine.yaml"
    mine.write_text("gpus: 4\n")
    dry_run.run(flags(data, "--config", str(mine)))
    assert "4 ranks = TP 1 x PP 1 x CP 1 x DP 4" in capsys.readouterr().out
    mine.write_text("gpus: 4\ndry-run-gpus: 8\n")
    with pytest.raises(ValueError, match=r"--dry-run-gpus must stand on the command line, got it from .*mine\.yaml; "
                                         "add the flag, or use the key `gpus`"):
        dry_run.run(flags(data, "--config", str(mine)))
    dry_run.run(flags(data, "--config", str(mine), "--dry-run-gpus", "2"))
    assert "2 ranks = TP 1 x PP 1 x CP 1 x DP 2" in capsys.readouterr().out


def test_a_cluster_that_is_none_names_the_flag_that_asked_for_it(data):
    with pytest.raises(ValueError, match="--dry-run-cluster: no cluster 'nowhere'"):
        dry_run.run(flags(data, "--dry-run-gpus", "1", "--dry-run-cluster", "nowhere"))


@pytest.mark.parametrize(("more", "key", "message"), [
    (["--dry-run-gpus", "8"], "", "--dry-run-gpus needs --dry-run, got 8 without it; add --dry-run"),
    (["--dry-run-cluster", "h800"], "", "--dry-run-cluster needs --dry-run, got h800 without it"),
    ([], "dry-run: true", "--dry-run must stand on the command line, got it from a configuration file"),
    ([], "dry-run-gpus: 8", "--dry-run-gpus needs --dry-run, got 8 without it"),
])
def test_what_asks_for_a_trial_never_starts_a_run(data, tmp_path, capsys, monkeypatch, more, key, message):
    monkeypatch.setattr("megatron_dsv.training.main._train", lambda args: pytest.fail("a run was started"))
    argv = [flag for flag in flags(data, *more) if flag != "--dry-run"]
    if key:
        (tmp_path / "more.yaml").write_text(key)
        argv += ["--config", str(tmp_path / "more.yaml")]
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
