"""Which backend serves: limits by name, and the fastest measured one under ``auto``."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.kernels import library, timings
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.dense_attention import flash4 as dense_flash4
from megatron_dsv.kernels.sparse_attention import api, choice, cudnn, flash4, op
from megatron_dsv.kernels.timing_rows import DenseRow, SparseRow
from megatron_dsv.testing.attention_oracle import AttentionCase, random_qkv, random_selection

CASE = AttentionCase(s=128, sk=128, b=1, h=2, heads_kv=2, d=128, q_block=128, kv_block=128)


@pytest.fixture
def hopper(monkeypatch):
    """Every tensor counts as one on a Hopper GPU with the libraries installed."""
    for module in (flash4, cudnn, dense_flash4):
        monkeypatch.setattr(module, "hopper_limit", lambda backend, x: None)


def _inputs(case=CASE, dtype=torch.bfloat16):
    selection, _ = random_selection(case)
    return *random_qkv(case, dtype=dtype)[:3], selection


@pytest.mark.parametrize("backend", ["flash4", "cudnn"])
def test_an_explicit_library_backend_never_falls_back(backend):
    q, k, v, selection = _inputs()
    message = (rf"backend='{backend}' needs tensors on a Hopper GPU \(compute capability 9.x\), got cpu; "
               "use backend='triton'")
    with pytest.raises(NotImplementedError, match=message):
        api.forward(q, k, v, selection, backend=backend)
    with pytest.raises(NotImplementedError, match=message):
        api.sparse_attention(q, k, v, selection, backend=backend)


def test_dense_flash4_names_its_limits_and_the_way_out(hopper):
    q, k, v, _ = _inputs(dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"takes torch.bfloat16 and torch.float16, got torch.float32; use ba"):
        dense.dense_attention(q, k, v, backend="flash4")
    q, k, v, _ = _inputs(replace(CASE, d=44))
    with pytest.raises(NotImplementedError, match="head dims up to 256 that are multiples of 8, got 44"):
        dense.forward(q, k, v, backend="flash4")
    on_device = torch.ones(1, dtype=torch.int32, device="meta")
    assert dense_flash4.limit(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), on_device) == (
        "needs kv_length on the host, as an int or a CPU tensor")


def test_dense_auto_repeats_bitwise_where_flash4_can_serve(hopper, monkeypatch):
    """Whatever is fastest: sdpa's plain backward refuses to repeat on CUDA, after a forward that went well."""
    q, k, v, _ = _inputs()
    taken = []
    for name in ("attention", "forward", "backward"):
        monkeypatch.setattr(dense_flash4, name, lambda *args, name=name, **options: taken.append(
            (name, options.get("deterministic"))) or (q, k, v))
        monkeypatch.setattr(dense.sdpa, name, lambda *args, **options: None)
    monkeypatch.setattr(dense, "_fastest", lambda *args: ("sdpa", "it is the fastest"))
    monkeypatch.setattr(dense, "device_name", lambda device: "toy")
    lse = torch.zeros(1, 2, 128)
    dense.dense_attention(q, k, v, deterministic=True)
    repeatable, length = Kernels(deterministic=True), torch.tensor([128], dtype=torch.int32)
    repeatable.forward(q, k, v, length, 0.1)
    repeatable.backward(q, q, k, v, q, lse, length, 0.1)
    assert taken == [("attention", True), ("forward", None), ("backward", True)]
    dense.backward(q, q, k, v, q, lse)
    dense.dense_attention(q, k, v)
    dense.forward(q, k, v)
    assert len(taken) == 3


def test_a_deterministic_forward_is_of_the_backwards_backend(monkeypatch):
    """Part of the keys, as under context parallelism: the kernel must not depend on how many heads a rank holds."""
    asked = []

    def chosen(pass_name, q, k, v, selection, deterministic):
        asked.append((pass_name, deterministic))
        return "reference"

    monkeypatch.setattr(op, "choose", chosen)
    q, k, v, selection = _inputs()
    repeatable = Kernels(deterministic=True)
    out, lse = repeatable.forward(q, k, v, selection, 0.1)
    repeatable.backward(out, q, k, v, out, lse, selection, 0.1)
    Kernels().forward(q, k, v, selection, 0.1)
    assert asked == [("forward", True), ("backward", True), ("forward", False)]


@pytest.mark.parametrize(("change", "dtype", "message"), [
    ({}, torch.float32, "takes torch.bfloat16 and torch.float16, got torch.float32"),
    ({"d": 80}, torch.bfloat16, "takes head dims 64, 96, 128, 256, got 80"),
    ({"q_block": 64}, torch.bfloat16, "takes query groups and key blocks of 128 tokens, got 64 and 128"),
    ({"kv_block": 1}, torch.bfloat16, "takes query groups and key blocks of 128 tokens, got 128 and 1"),
    ({"heads_kv": 1}, torch.float16, None)])
def test_limits_of_sparse_flash4(hopper, change, dtype, message):
    q, _, _, selection = _inputs(replace(CASE, **change), dtype)
    assert flash4.limit(q, selection) == message
    if message is None:
        assert flash4.limit(q, selection, deterministic=True) == "has no deterministic backward"


@pytest.mark.parametrize(("change", "dtype", "message"), [
    ({}, torch.float16, "takes torch.bfloat16, got torch.float16"),
    ({"d": 64}, torch.bfloat16, "takes a head dim of 128, got 64"),
    ({"heads_kv": 1}, torch.bfloat16, "takes as many key/value heads as query heads, got 1 and 2"),
    ({"kv_block": 64}, torch.bfloat16,
     "takes query groups and key blocks of 64 tokens or of 128 tokens, got 128 and 64"),
    ({"q_block": 64, "kv_block": 64, "s": 100}, torch.bfloat16,
     "takes a multiple of 64 queries at 64-token blocks, got 100"),
    ({"s": 100}, torch.bfloat16, None)])
def test_limits_of_cudnn(hopper, change, dtype, message):
    q, k, v, selection = _inputs(replace(CASE, **change), dtype)
    assert cudnn.limit(q, k, v, selection) == message
    if message is None:
        assert cudnn.limit(q, k, v, selection, deterministic=True) == "has no deterministic backward"
        shifted = torch.empty(q.numel() + 4, dtype=dtype)[4:].view_as(q)
        assert "multiples of 16 bytes" in cudnn.limit(shifted, k, v, selection)


def test_auto_takes_the_fastest_of_a_pass_and_says_why(monkeypatch, caplog):
    rows = (SparseRow("triton", 128, 128, 65536, 24, 128, 0.1, 11.0, 37.0),
            SparseRow("flash4", 128, 128, 65536, 24, 128, 0.1, 9.0, 27.0),
            SparseRow("cudnn", 128, 128, 65536, 24, 128, 0.1, 13.0, 25.0))
    monkeypatch.setattr(timings, "SPARSE", {"toy": rows})
    choice._fastest.cache_clear()
    choice._logged.clear()

    def pick(pass_name, able, head_dim=128, device="toy"):
        return choice._fastest(pass_name, able, device, 65536, 24, head_dim, 0.1, 128, 128)

    everything = ("triton", "flash4", "cudnn")
    with caplog.at_level("INFO", logger=choice.__name__):
        assert (pick("forward", everything), pick("backward", everything)) == ("flash4", "cudnn")
        assert pick("backward", ("triton", "flash4")) == "flash4"
        assert pick("forward", ("triton",)) == "triton"
        assert pick("forward", ("triton", "flash4"), head_dim=64) == "flash4"
        assert pick("forward", everything, device="other") == "triton"
    assert caplog.messages[0] == (
        "sparse_attention: backend='auto' took 'flash4' for the forward because of the measured backends that can "
        "serve 128 x 128 blocks and head dim 128 on toy it is the fastest (triton 11 ms, flash4 9 ms, cudnn 13 ms)")
    choice._fastest.cache_clear()


def test_dense_auto_compares_both_passes_at_one_shape(monkeypatch):
    rows = (DenseRow("sdpa", 65536, 24, 128, 80.0, 240.0), DenseRow("flash4", 65536, 24, 128, 85.0, 220.0))
    monkeypatch.setattr(timings, "DENSE", {"toy": rows})
    dense._compare.cache_clear()
    assert dense._fastest(("forward", "backward"), "toy", 128)[0] == "flash4"
    assert dense._fastest(("forward",), "toy", 128)[0] == "sdpa"
    assert dense._fastest(("forward",), "other", 128) == ("sdpa", "nothing was measured on other")
    dense._compare.cache_clear()


def test_installed_reads_the_packages_of_this_environment(monkeypatch):
    assert library._is_installed("pytest")
    assert not library._is_installed("no-such-package-at-all")
    monkeypatch.setitem(library._INSTALLED, "cudnn", False)
    assert (library.installed("cudnn"), library.installed("triton")) == (False, True)


class _StandIn:
    """flash_attn.cute.interface as its source describes it: batch-first views in, given outputs filled."""

    @staticmethod
    def _flash_attn_fwd(q, k, v, *, softmax_scale, out, lse):
        got, got_lse = dense.forward(*(x.transpose(0, 1) for x in (q, k, v)), softmax_scale=softmax_scale,
                                     backend="reference")
        out.copy_(got.transpose(0, 1))
        lse.copy_(got_lse)

    @staticmethod
    def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, deterministic, dq, dk, dv):
        tensors = (x.transpose(0, 1) for x in (dout, q, k, v, out))
        grads = dense.backward(*tensors, lse, softmax_scale=softmax_scale, backend="reference")
        for given, grad in zip((dq, dk, dv), grads):
            given.copy_(grad.transpose(0, 1))


@pytest.fixture
def stand_in(hopper, monkeypatch):
    package = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", _StandIn)
    monkeypatch.setattr(dense, "device_name", lambda device: "NVIDIA H200")


@pytest.mark.parametrize("kv_length", [None, 50, 0, torch.tensor([70, 33], dtype=torch.int32)])
def test_dense_flash4_slices_the_keys_and_pads_the_gradients(stand_in, kv_length):
    case = AttentionCase(s=40, sk=80, b=2, h=4, heads_kv=2, d=16, q_block=1, kv_block=1)
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for backend in ("flash4", "reference"):
        out = dense.dense_attention(*leaves, kv_length=kv_length, backend=backend)
        plain, lse = dense.forward(q, k, v, kv_length=kv_length, backend=backend)
        grads = dense.backward(dout, q, k, v, plain, lse, kv_length=kv_length, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, dout), plain, lse, *grads))
    for mine, exact in zip(*results):
        torch.testing.assert_close(mine, exact, rtol=2**-7, atol=2**-10)


def test_dense_auto_compiles_into_one_graph_for_every_length(stand_in):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: dense.dense_attention(*x), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (40, 72, 100):
            case = AttentionCase(s=tokens, sk=tokens, b=1, h=2, heads_kv=2, d=16, q_block=1, kv_block=1)
            q, k, v, dout = random_qkv(case, dtype=torch.bfloat16)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            for leaf in leaves:
                torch._dynamo.mark_dynamic(leaf, 0)
            out, exact = compiled(*leaves), dense.dense_attention(*leaves, backend="reference")
            assert torch.equal(out, exact)
            for mine, other in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact, leaves, dout)):
                assert torch.equal(mine, other)
