import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from megatron_dsv.training import arguments
from megatron_dsv.training.run_config import write_run_config
from megatron_dsv.training.validation import check_data_folder

ROOT = Path(__file__).resolve().parents[3]
BASE = ["--config", "model/debug", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4",
        "--latent-data", "x"]


def dry(*flags, ranks=1, **kwargs):
    return arguments.dry_parse([*BASE, *flags], ranks, **kwargs)


def test_defaults_are_those_of_a_video_model():
    args = dry()
    assert (args.position_embedding_type, args.tokenizer_type, args.attention_dropout) == ("none", "NullTokenizer", 0.0)
    assert args.calculate_per_token_loss
    assert args.dist_ckpt_optim_fully_reshardable
    assert args.transformer_impl == "local"
    assert (args.dsv_sparse_stage, args.dit_patch_size, args.flow_shift) == ("dense", "1x2x2", 1.0)
    assert args.layernorm_epsilon == 1e-6


def test_help_lists_our_flags_and_megatrons(capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse_or_raise([*BASE, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--dsv-sparse-stage", "--num-layers", "--moe-paged-stash-buffer-size-factor-cuda", "--config"):
        assert flag in text, flag


def test_a_switch_that_the_project_turns_on_can_be_turned_off():
    assert not dry("--no-dist-ckpt-optim-fully-reshardable").dist_ckpt_optim_fully_reshardable


def test_a_given_sequence_length_needs_no_second_flag():
    assert dry("--seq-length", "4096").max_position_embeddings == 4096


@pytest.mark.parametrize(("flags", "ranks", "words"), [
    (["--tensor-model-parallel-size", "3"], 3,
     "--tensor-model-parallel-size must divide --num-attention-heads 4, got 3"),
    (["--hidden-size", "66"], 1, "--hidden-size must be a multiple of --num-attention-heads 4, got 66"),
    (["--pipeline-model-parallel-size", "3"], 3, "--pipeline-model-parallel-size must divide --num-layers 4, got 3"),
    (["--tensor-model-parallel-size", "2"], 3, "must divide the number of ranks 3, got 2 x 1 x 1"),
    (["--context-parallel-size", "3"], 4, "must divide the number of ranks 4, got 1 x 1 x 3"),
    (["--context-parallel-size", "0"], 1, "--context-parallel-size must be an integer of at least 1, got 0"),
    (["--dsv-cp-plan", "random"], 1, "--dsv-cp-plan random needs --context-parallel-size above 1, got 1"),
    (["--context-parallel-size", "2", "--global-batch-size", "3"], 4,
     "--global-batch-size must be a multiple of --micro-batch-size x data-parallel ranks (1 x 2), got 3"),
    (["--global-batch-size", "3"], 2, "--global-batch-size must be a multiple of --micro-batch-size x data-parallel "
     "ranks (1 x 2), got 3"),
    (["--sequence-parallel"], 1, "--sequence-parallel needs --tensor-model-parallel-size above 1, got 1"),
    (["--save", "runs/x"], 1, "--save needs --save-interval"),
    (["--position-embedding-type", "rope"], 1, "--position-embedding-type must be none, got rope"),
    (["--no-calculate-per-token-loss"], 1, "--no-calculate-per-token-loss is not allowed"),
    (["--data-path", "text"], 1, "--data-path is for text, got ['text']; use --latent-data"),
    (["--hidden-size", "16"], 1, "--dit-position rope needs a head size of at least 6"),
    (["--dsv-predictor-rank", "0"], 1, "--dsv-predictor-rank must be an integer, at least 1 and at most 256, got '0'"),
    (["--dsv-predictr-rank", "4"], 1, "unknown flag --dsv-predictr-rank; did you mean --dsv-predictor-rank?"),
    (["--attention-backend", "fast"], 1,
     "--attention-backend must be one of flash, fused, unfused, local, auto, got 'fast'"),
    (["--lr-decay-style", "fast"], 1, "--lr-decay-style: invalid choice: 'fast'"),
    (["--num-layers", "four"], 1, "--num-layers: invalid int value: 'four'"),
    (["--min-lr", "2"], 1,
     "megatron-core refuses the arguments: args.min_lr <= args.lr, got --min-lr 2.0, --lr 0.0001"),
    (["--overlap-param-gather"], 1,
     "megatron-core refuses the arguments: --overlap-param-gather only supported with distributed optimizer"),
    (["--overlap-param-gather", "--use-distributed-optimizer"], 1,
     "megatron-core refuses the arguments: Must use --overlap-param-gather with --overlap-grad-reduce"),
    (["--fp16", "--bf16"], 1, "--bf16 and --fp16 exclude each other, got both"),
    (["--micro-batch-size", "0"], 1, "--micro-batch-size must be an integer of at least 1, got 0"),
])
def test_misuse_is_one_line_with_flag_allowed_and_got(flags, ranks, words):
    with pytest.raises(ValueError, match="--") as caught:
        dry(*flags, ranks=ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_transformer_engine_must_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="install the extra `te` or use --transformer-impl local"):
        dry("--transformer-impl", "transformer_engine")


def test_transformer_engine_must_be_one_that_megatron_loads(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"a Transformer Engine that megatron-core can load, got 0\.0\.0; "):
        dry("--transformer-impl", "transformer_engine")


@pytest.mark.parametrize("flags", [
    ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"], ["--recompute-activations"],
    ["--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer"], ["--fp16"], ["--bf16"],
])
def test_what_is_supported_passes(flags):
    dry(*flags)


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "micro-batch-size", "lr", "latent-data"])
def test_what_is_required_is_named(tmp_path, name):
    unset = tmp_path / "unset.yaml"
    everything = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "micro-batch-size": 1, "lr": 1e-4,
                  "latent-data": "x", "train-iters": 1}
    unset.write_text(yaml.safe_dump(everything | {name: None}))
    with pytest.raises(ValueError, match=f"--{name} is required, got nothing; "):
        arguments.dry_parse(["--config", str(unset)], 1)


@pytest.mark.parametrize(("flags", "ranks", "words"), [
    (["--hierarchical-context-parallel-sizes", "2", "1", "--context-parallel-size", "2"], 2,
     "--hierarchical-context-parallel-sizes 2 1 is not supported; leave it unset"),
    (["--cp-comm-type", "a2a", "--context-parallel-size", "2"], 2,
     "--cp-comm-type a2a is not supported; leave it unset: --dsv-cp-plan says how"),
    (["--use-megatron-fsdp"], 1, "--use-megatron-fsdp is not supported; use --use-distributed-optimizer"),
    (["--use-torch-fsdp2"], 1, "--use-torch-fsdp2 is not supported; use --use-distributed-optimizer"),
    (["--num-virtual-stages-per-pipeline-rank", "2"], 2, "--num-virtual-stages-per-pipeline-rank 2 is not supported"),
    (["--cuda-graph-impl", "local"], 1, "--cuda-graph-impl local is not supported"),
    (["--fp8-format", "hybrid"], 1, "--fp8-format hybrid is not supported; use --bf16"),
    (["--num-experts", "4"], 1, "--num-experts 4 is not supported"),
    (["--attention-dropout", "0.1"], 1, "--attention-dropout 0.1 is not supported"),
    (["--hidden-dropout", "0.1"], 1, "--hidden-dropout 0.1 is not supported; leave it at 0"),
    (["--init-model-with-meta-device"], 1, "--init-model-with-meta-device is not supported; leave it unset"),
    (["--log-validation-ppl-to-tensorboard"], 1,
     "--log-validation-ppl-to-tensorboard is not supported; leave it unset: a diffusion loss has no perplexity"),
    (["--full-validation"], 1, "--full-validation is not supported; use --eval-iters"),
    (["--multiple-validation-sets"], 1, "--multiple-validation-sets is not supported"),
    (["--dataloader-type", "cyclic"], 1, "--dataloader-type cyclic is not supported; leave it at single"),
    (["--rampup-batch-size", "1", "1", "4"], 1, "--rampup-batch-size 1 1 4 is not supported; use --global-batch-size"),
    (["--num-layers-per-virtual-pipeline-stage", "1", "--pipeline-model-parallel-size", "2"], 2,
     "--num-layers-per-virtual-pipeline-stage 1 is not supported; use --pipeline-model-parallel-size alone"),
    (["--recompute-granularity", "selective", "--recompute-modules", "mlp"], 1,
     "--recompute-modules mlp is not supported; use --recompute-granularity full"),
    (["--swiglu"], 1, "--swiglu is not supported; use --dit-mlp"),
    (["--qk-layernorm"], 1, "--qk-layernorm is not supported; use --dit-qk-norm rms"),
    (["--apply-layernorm-1p"], 1, "--apply-layernorm-1p is not supported"),
    (["--window-size", "4,4"], 1, "--window-size (4, 4) is not supported; use --dsv-attention window-1/3"),
    (["--fp32-residual-connection", "--bf16"], 1, "--fp32-residual-connection is not supported"),
    (["--use-precision-aware-optimizer", "--use-distributed-optimizer"], 1,
     "--use-precision-aware-optimizer is not supported without Transformer Engine"),
    (["--num-distributed-optimizer-instances", "2"], 2, "--num-distributed-optimizer-instances 2 is not supported"),
    (["--ckpt-format", "torch"], 1, "--ckpt-format torch is not supported; use torch_dist"),
    (["--optimizer", "muon"], 1, "--optimizer muon is not supported; use adam"),
    (["--yaml-cfg", "x.yaml"], 1, "--yaml-cfg is not supported; use --config"),
])
def test_what_is_not_supported_names_the_way_out(flags, ranks, words):
    with pytest.raises(NotImplementedError) as caught:
        dry(*flags, ranks=ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_data_folder_must_hold_a_data_set(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(arguments.HostError, match=r"--latent-data must be a folder .* which does not exist"):
        dry("--latent-data", str(tmp_path / "gone"), check_files=True)
    with pytest.raises(arguments.HostError, match=r"holds no dataset\.json"):
        dry("--latent-data", str(empty), check_files=True)
    (empty / "dataset.json").write_text("{}")
    dry("--latent-data", str(empty), check_files=True)


def test_a_data_folder_that_the_host_cannot_look_into(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr("pathlib.Path.is_dir", stale)
    with pytest.raises(ValueError, match=r"--latent-data must be a folder that this host can read, got .*: Stale f"):
        check_data_folder(str(tmp_path))


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("dsv-predictor-rank: many\n")
    with pytest.raises(ValueError, match=r"^mine\.yaml: --dsv-predictor-rank must be an integer"):
        dry("--config", str(path))
    assert dry("--config", str(path), "--dsv-predictor-rank", "4").dsv_predictor_rank == 4


@pytest.mark.parametrize(("rank", "local_rank", "flags", "lines"), [
    ("0", "0", ["--lr", "x"], 1), ("1", "1", ["--lr", "x"], 0), ("8", "0", ["--lr", "x"], 0),
    # Only this host may lack the folder, so its first rank speaks and names the host.
    ("8", "0", [], 1), ("9", "1", [], 0),
])
def test_one_rank_prints_one_line_and_all_exit_with_2(rank, local_rank, flags, lines, monkeypatch, capsys, tmp_path):
    slept = []
    monkeypatch.setattr(arguments.time, "sleep", slept.append)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", "16"),
                        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        arguments.parse([*BASE, "--latent-data", str(tmp_path / "gone"), *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == lines
    assert bool(slept) == (lines == 0)
    if lines and not flags:
        assert "error on " in error


@pytest.mark.parametrize(("environment", "words"), [
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be a whole number of at least 1, got 'abc'; start ranks with torchrun"),
    ({"RANK": "-1"}, "RANK must be a whole number of at least 0, got '-1'"),
    ({"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number of at least 0, got ''"),
    ({"RANK": "1"}, "RANK must be below WORLD_SIZE, which is not set, got 1"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE, 2, got 2"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 needs RANK, got none"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE 2 needs MASTER_ADDR, got none"),
    ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK must be below LOCAL_WORLD_SIZE, 4, got 4"),
])
def test_a_process_that_does_not_know_its_rank_says_so_at_once(environment, words, monkeypatch, capsys):
    monkeypatch.setattr(arguments.time, "sleep", lambda _: pytest.fail("it does not speak"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        arguments.parse(BASE)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_dry_parse_leaves_no_trace(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    before = list(sys.argv)
    assert dry(ranks=8).data_parallel_size == 8
    assert "WORLD_SIZE" not in os.environ
    assert os.environ["RANK"] == "3"
    assert sys.argv == before


def test_the_run_folder_gets_a_config_that_repeats_the_run(tmp_path):
    args = dry("--config", "dsv/auto", "--dsv-keep-ratio", "0.25", "--flow-shift", "3", "--no-dsv-keep-own-block",
               "--latent-data", str(tmp_path / "data"))
    assert write_run_config(args) is None
    path = write_run_config(args, str(tmp_path / "run"))
    again = arguments.dry_parse(["--config", str(path)], 1)
    varying = {"config", "launch_argv", "expanded_argv", "launch_settings"}
    assert {k: v for k, v in vars(again).items() if k not in varying} == \
        {k: v for k, v in vars(args).items() if k not in varying}
    resolved = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())
    assert resolved["dsv_keep_ratio"] == 0.25
    assert resolved["num_layers"] == 4
    write_run_config(args, str(tmp_path / "run"))
    assert len((tmp_path / "run" / "launches.txt").read_text().splitlines()) == 2
    args.rank = 1
    assert write_run_config(args, str(tmp_path / "other")) is None
    assert not (tmp_path / "other").exists()


def test_the_written_config_holds_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    monkeypatch.chdir(tmp_path / "launch")
    mine = tmp_path / "mine.yaml"
    mine.write_text("latent-data: ../data\n")
    args = arguments.dry_parse([*BASE[:-2], "--config", str(mine), "--save", "runs/x", "--save-interval", "1",
                                "--tensorboard-dir", "msc://logs/x"], 1)
    path = write_run_config(args, str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    again = arguments.dry_parse(["--config", str(path)], 1)
    assert again.latent_data == str(tmp_path / "data")
    assert again.save == str(tmp_path / "launch" / "runs" / "x")
    assert again.tensorboard_dir == "msc://logs/x"


def test_a_run_is_repeated_as_the_readme_says(tmp_path, monkeypatch):
    """Its configuration holds the folders that it saves to and loads from."""
    monkeypatch.chdir(tmp_path)
    args = dry("--save", "runs/first", "--load", "runs/first", "--save-interval", "1", "--tensorboard-dir",
               "runs/first/tensorboard")
    write_run_config(args)
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"`(--config runs/first/config\.yaml --save [^`]*)` repeats it", readme).group(1)
    again = arguments.dry_parse(command.split(), 1)
    assert (again.save, again.load, again.tensorboard_dir) == ("runs/second", "runs/second", "runs/second/tensorboard")
    assert not [key for key, value in again.launch_settings.items() if "first" in str(value)]


@pytest.mark.parametrize(("flag", "given", "repeated"), [
    ("--dsv-cp-cluster", "h200", "h200"), ("--dsv-cp-cluster", "mine/h800.yaml", "{here}/mine/h800.yaml"),
    ("--dsv-cp-calibration", "../costs.json", "{above}/costs.json")])
def test_the_machines_of_plans_are_found_from_any_folder(tmp_path, monkeypatch, flag, given, repeated):
    (tmp_path / "launch").mkdir()
    monkeypatch.chdir(tmp_path / "launch")
    path = write_run_config(dry("--context-parallel-size", "2", flag, given, ranks=2), str(tmp_path / "run"))
    settings = yaml.safe_load(path.read_text())
    assert settings[flag[2:]] == repeated.format(here=tmp_path / "launch", above=tmp_path)
