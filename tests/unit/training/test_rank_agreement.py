"""Ranks that found other facts are told so before anything is built, all of them, in one line."""

import argparse
import os
from pathlib import Path

import pytest

from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.kernels import library
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.programs import run_program
from megatron_dsv.testing.ranks import run_ranks
from megatron_dsv.training import rank_agreement
from megatron_dsv.training.arguments import dry_parse
from megatron_dsv.training.rank_agreement import Fact, RanksDifferError, check_agreement, facts_of

FLAGS = ("--config model/debug --latent-valid-samples 1 --micro-batch-size 1 --train-iters 1 --lr 1e-4 "
         "--lr-decay-style constant --eval-iters 0 --num-layers 2 --hidden-size 48 --ffn-hidden-size 96 "
         "--dsv-q-block-size 8 --dsv-kv-block-size 8").split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latents(tmp_path_factory.mktemp("latents"), [(3, 8, 12)] * 4)


def _found(facts):
    rank = int(os.environ["RANK"])
    rank_agreement.socket.gethostname = lambda: f"node{rank // 2}"
    try:
        check_agreement({name: Fact(values[rank], "do this") for name, values in facts.items() if values[rank]})
    except RanksDifferError as error:
        return str(error)
    return None


def test_every_rank_hears_which_ranks_differ_and_where():
    same = ["x"] * 4
    assert run_ranks(_found, 4, {"the GPU": same, "the data set": ["y"] * 4}) == [None] * 4
    heard = run_ranks(_found, 4, {"their software": same, "the GPU": ["H200", "H200", "H800", "H200"]})
    assert heard == ["all ranks must have the GPU in common, got H200 on ranks 0-1, 3 (node0, node1), H800 on rank 2 "
                     "(node1); do this"] * 4
    heard = run_ranks(_found, 4, {"--seed": ["", "", "", "3"]})
    assert heard == ["all ranks must have --seed in common, got nothing on ranks 0-2 (node0, node1), 3 on rank 3 "
                     "(node1); do this"] * 4


def test_a_long_list_of_ranks_and_hosts_is_cut():
    hosts = [f"node{rank}" for rank in range(10)]
    assert rank_agreement._where(range(0, 10, 2), hosts) == "ranks 0, 2, 4 and 2 more (node0, node2, node4 and 2 more)"


def _names(data: Path, flags: str, ranks: int = 2) -> set[str]:
    args = dry_parse([*FLAGS, "--latent-data", str(data), *flags.split()], ranks)
    facts = facts_of(args, LatentDataset(data, text_length=16))
    assert facts["--num-layers"].value == "2"
    return {name for name in facts if not name.startswith("--")}


def test_only_what_a_run_depends_on_is_compared(data, monkeypatch):
    always = {"their software", "the data set"}
    # Of devices without measured times all decide alike, whatever their packages.
    assert _names(data, "--dsv-sparse-stage auto") == always | {"the kind of GPU"}
    monkeypatch.setattr(rank_agreement, "device_name", lambda: "NVIDIA H200")
    assert _names(data, "--dsv-sparse-stage dense") == always
    assert _names(data, "--dsv-sparse-stage auto") == always | {"the attention packages", "the kind of GPU"}
    # A threshold decides without them.
    assert _names(data, "--dsv-sparse-stage auto --dsv-dense-above 0.5") == always
    assert _names(data, "--dsv-attention window-1/3") == always
    split = _names(data, "--dsv-sparse-stage dense --context-parallel-size 2")
    assert split == always | {"the number of ranks on their host"}
    # Groups of fixed plans follow from the ranks of one group on a host, not from all that the host has.
    found = []
    for ranks in "24":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        args = dry_parse([*FLAGS, "--latent-data", str(data), "--context-parallel-size", "2", "--dsv-cp-plan", "heads"],
                         2)
        found.append(facts_of(args, LatentDataset(data, text_length=16))["the context-parallel ranks of a host"].value)
    assert found == ["2", "2"]


def test_facts_follow_the_host(data, tmp_path, monkeypatch):
    args = dry_parse([*FLAGS, "--latent-data", str(data), "--dsv-sparse-stage", "auto"], 2)
    monkeypatch.setattr(rank_agreement, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(library, "_INSTALLED", {"flash4": True, "cudnn": True})
    here = facts_of(args, LatentDataset(data, text_length=16))
    monkeypatch.setattr(library, "_INSTALLED", {"flash4": False, "cudnn": True})
    other = write_latents(tmp_path / "other", [(3, 8, 12)] * 5)
    # Elsewhere the same data set may lie at another path.
    args = argparse.Namespace(**vars(args) | {"launch_settings": args.launch_settings | {"latent-data": "/elsewhere"}})
    there = facts_of(args, LatentDataset(other, text_length=16))
    differ = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    assert differ == {"the data set", "the attention packages"}
    assert there["the attention packages"].value == "nvidia-cudnn-frontend"
    assert there["the data set"].value.startswith("5 samples with index ")
    monkeypatch.setattr(rank_agreement, "device_name", lambda: "NVIDIA H800")
    assert facts_of(args, LatentDataset(other, text_length=16))["the kind of GPU"].value == "one that was not measured"


def _outcome(arguments, folder):
    if os.environ["RANK"] == "1":
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    return run_program(arguments, folder)


def test_a_launch_on_hosts_of_other_sizes_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dsv.training.arguments._EXIT_GRACE_SECONDS", 0.0)
    outcomes = run_ranks(_outcome, 2, [*FLAGS, "--latent-data", str(data), "--context-parallel-size", "2",
                                       "--dsv-sparse-stage", "dense"], tmp_path)
    assert [code for code, _ in outcomes] == [2, 2]
    lines = [line for _, text in outcomes for line in text.splitlines()]
    assert len(lines) == 1, lines
    assert "error: all ranks must have the number of ranks on their host in common, got 2 on rank 0 (" in lines[0]
    assert lines[0].endswith("; start as many ranks on every host, or take --dsv-cp-plan sequence")
