"""A launch that asks for attention kernels which cannot serve it is refused at its start."""

import argparse
import sys

import pytest

from megatron_dsv.training import dry_run, kernel_checks, validation
from megatron_dsv.training.host_checks import check_host


def test_repeatable_gradients_of_split_sequences_need_a_kernel_that_repeats(parsed, monkeypatch):
    def check(**changes):
        check_host(argparse.Namespace(**vars(parsed) | {
            "distributed_backend": "gloo", "context_parallel_size": 2, "dsv_deterministic": True, "bf16": True,
            "kv_channels": 64, **changes}))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernel_checks, "hopper_limit", lambda backend, device: f"needs a Hopper GPU, got {device}")
    with pytest.raises(NotImplementedError, match=r"--dsv-deterministic with --context-parallel-size 2 needs --dsv-den"
                                                  r"se-backend flash4 or reference, got auto: flash4 needs a Hopper GPU"
                                                  r", got cuda:0, and .* use reference"):
        check()
    with pytest.raises(NotImplementedError, match=r"--dsv-deterministic needs --dsv-dense-backend flash4 or reference, "
                                                  r"got auto: flash4 .*; add --deterministic-mode, under which they "):
        check(context_parallel_size=1)
    check(dsv_deterministic=False)
    check(context_parallel_size=1, deterministic_mode=True)
    check(dsv_dense_backend="reference")
    monkeypatch.setattr(kernel_checks, "hopper_limit", lambda backend, device: None)
    check()
    with pytest.raises(NotImplementedError, match=r"got auto: flash4 takes torch.bfloat16 and torch.float16, got torc"):
        check(bf16=False)
    with pytest.raises(NotImplementedError, match=r"got sdpa: sdpa was asked for, .* or drop --dsv-deterministic"):
        check(dsv_dense_backend="sdpa")


KIND = {"dsv_sparse_stage": "sparse", "bf16": True, "kv_channels": 128, "dsv_q_block_size": 128,
        "dsv_kv_block_size": 128}


@pytest.mark.parametrize(("changes", "words"), [
    ({"dsv_sparse_backend": "flash4", "dsv_q_block_size": 64, "dsv_kv_block_size": 64},
     "--dsv-sparse-backend flash4 takes query groups and key blocks of 128 tokens, got 64 and 64 (--bf16, heads of "
     "128, --dsv-q-block-size 64, --dsv-kv-block-size 64); use auto"),
    ({"dsv_sparse_backend": "cudnn", "dsv_deterministic": True},
     "--dsv-sparse-backend cudnn has no deterministic backward (--bf16, heads of 128, --dsv-q-block-size 128, "
     "--dsv-kv-block-size 128, --dsv-deterministic); use auto"),
    ({"dsv_sparse_backend": "cudnn", "bf16": False, "fp16": True},
     "--dsv-sparse-backend cudnn takes torch.bfloat16, got torch.float16 (--fp16, "),
    ({"dsv_sparse_backend": "flash4", "bf16": False}, "got torch.float32 (neither --bf16 nor --fp16, "),
    ({"dsv_sparse_backend": "cudnn", "kv_channels": None}, "--dsv-sparse-backend cudnn takes a head dim of 128, got "),
    ({"dsv_sparse_backend": "triton", "kv_channels": 512}, "--dsv-sparse-backend triton takes head dims up to 256, "),
    ({"dsv_dense_backend": "flash4", "bf16": False},
     "--dsv-dense-backend flash4 takes torch.bfloat16 and torch.float16, got torch.float32 (neither --bf16 nor"),
    ({"dsv_dense_backend": "flash4", "kv_channels": 260, "dsv_sparse_stage": "dense"},
     "--dsv-dense-backend flash4 takes head dims up to 256 that are multiples of 8, got 260 (--bf16, heads of 260"),
])
def test_a_kernel_asked_for_by_name_must_serve_the_launch(refused, parsed, changes, words):
    """On every host alike, before the layer is sparse that would first use it."""
    assert words in refused(**KIND | changes)
    unused = {"dsv_sparse_stage": "predictor", "dsv_dense_backend": "auto"}
    validation.validate(argparse.Namespace(**vars(parsed) | KIND | changes | unused), check_files=False)


@pytest.mark.parametrize("backend", ["auto", "reference", "triton", "flash4", "cudnn"])
def test_a_kernel_that_serves_is_taken_on_any_host_without_its_library(parsed, backend, monkeypatch):
    for library in ("triton", "cudnn", "flash_attn"):
        monkeypatch.setitem(sys.modules, library, None)
    args = argparse.Namespace(**vars(parsed) | KIND | {"dsv_sparse_backend": backend, "dsv_dense_backend": "flash4"})
    validation.validate(args, check_files=False)


def test_a_gpu_must_have_the_kernels_that_are_asked_for_by_name(parsed, monkeypatch):
    def check(**changes):
        check_host(argparse.Namespace(**vars(parsed) | {"distributed_backend": "gloo"} | KIND | changes))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernel_checks, "hopper_limit", lambda backend, device: f"needs a Hopper GPU, got {device}")
    for flag, backend in (("dsv_dense_backend", "flash4"), ("dsv_sparse_backend", "flash4"),
                          ("dsv_sparse_backend", "cudnn")):
        with pytest.raises(NotImplementedError, match=f"--{flag.replace('_', '-')} {backend} needs a Hopper GPU, got "
                                                      "cuda:0; use auto"):
            check(**{flag: backend})
    check()
    check(dsv_sparse_backend="cudnn", dsv_sparse_stage="predictor")
    check(dsv_sparse_backend="triton", dsv_dense_backend="sdpa")


@pytest.mark.parametrize("named", ["dry_run_cluster", "dsv_cp_cluster"])
def test_a_dry_run_for_named_machines_asks_nothing_of_this_hosts_gpu(parsed, monkeypatch, named):
    def check(**changes):
        dry_run._check_gpus(argparse.Namespace(**vars(parsed) | {"dry_run_cluster": None} | KIND
                                               | {"dsv_dense_backend": "flash4"} | changes))

    check()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernel_checks, "hopper_limit", lambda backend, device: f"needs a Hopper GPU, got {device}")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        check()
    check(**{named: "h800"})


def test_split_sequences_are_dense_in_half_precision_on_a_gpu(parsed, monkeypatch):
    def check(**changes):
        check_host(argparse.Namespace(**vars(parsed) | {"distributed_backend": "gloo", "context_parallel_size": 2}
                                      | KIND | changes))

    check(bf16=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(NotImplementedError, match=r"--context-parallel-size 2 needs --bf16 or --fp16 on GPUs, got fp32:"
                                                  r" .*; add --bf16, or use --dsv-dense-backend reference"):
        check(bf16=False)
    check()
    for changes in ({"context_parallel_size": 1}, {"dsv_dense_backend": "reference"}, {"dsv_keep_ratio": 0.1}):
        check(bf16=False, **changes)
