"""Cases of the Triton block scores for the CPU interpreter; test_block_scores_triton.py runs them in their own process.

TRITON_INTERPRET must be set before triton is imported. bf16 is absent: the dot of the interpreter is wrong there.
"""

import mmap

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import block_scores, chunked_block_scores, pool_queries
from megatron_dsv.kernels.block_scores.triton import launch

# (key/value block, proxies, key heads, rank, keys, query groups): whole, single-token, odd, long and short blocks.
SHAPES = [(64, 4, 1, 16, 120, 3), (1, 2, 2, 12, 70, 2), (24, 3, 2, 4, 60, 5), (256, 1, 1, 20, 270, 2),
          (8, 1, 1, 32, 70, 70)]


def _check(shape, reduction, dtype, lengths=None):
    block, proxies, heads_kv, rank, sk, groups = shape
    q, k = torch.randn(groups * proxies, 2, 2, rank).to(dtype), torch.randn(sk, 2, heads_kv, rank).to(dtype)
    if lengths is None:
        lengths = torch.tensor([[sk], [sk // 2 - 3]]).expand(2, heads_kv)
    arguments = {"kv_block_size": block, "proxies": proxies, "reduction": reduction, "kv_length": lengths}
    exact = block_scores(q.double(), k.double(), **arguments)
    for item in range(2):
        for head in range(heads_kv):
            k[lengths[item, head]:, item, head] = torch.nan
    got = block_scores(q, k, backend="triton", **arguments)
    torch.testing.assert_close(got, exact, rtol=2e-5, atol=2e-6)
    if reduction == "mass":
        has_keys = (lengths > 0).repeat_interleave(2 // heads_kv, 1)
        torch.testing.assert_close(got.sum(-1), (has_keys * proxies).float()[..., None].expand(got.shape[:3]))


@pytest.fixture(autouse=True)
def _unwritten_output_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("shape", "reduction"), [*((shape, "mass") for shape in SHAPES), (SHAPES[1], "lse"),
                                                  (SHAPES[2], "lse"), (SHAPES[2], "max"), (SHAPES[3], "max")])
def test_fp16_scores_match_the_reference_and_ignore_padding(shape, reduction):
    _check(shape, reduction, torch.float16)


def test_fp32_scores_match_the_reference():
    _check(SHAPES[2], "mass", torch.float32)


def test_logits_too_large_for_plain_sums_match_too():
    q, k = torch.randn(6, 1, 1, 16).half(), torch.randn(50, 1, 1, 16).half()
    for reduction in ("mass", "lse"):
        options = {"kv_block_size": 16, "proxies": 2, "softmax_scale": 30.0, "reduction": reduction}
        got, exact = block_scores(q, k, backend="triton", **options), block_scores(q.double(), k.double(), **options)
        torch.testing.assert_close(got, exact, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize(("tokens", "block", "proxies", "shape"), [(50, 16, 4, (2, 3, 8)), (33, 12, 3, (1, 2, 20))])
def test_pooled_queries_match_the_reference(tokens, block, proxies, shape):
    q = torch.randn(shape[0], tokens, *shape[1:]).half().transpose(0, 1)
    length = torch.randint(0, tokens + 1, (shape[0],))
    q[tokens - 3:] = torch.nan
    options = {"q_block_size": block, "proxies": proxies, "query_length": length.clamp_max(tokens - 3)}
    got, exact = (pool_queries(q, **options, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)
    assert got.shape == (-(-tokens // block) * proxies, *shape)


def test_spans_of_keys_add_up_and_may_lie_past_the_length(monkeypatch):
    monkeypatch.setattr(launch, "_SPAN_TOKENS", 128)
    _check((32, 1, 2, 8, 290, 3), "mass", torch.float16, torch.tensor([[290, 70], [0, 129]]))


def test_chunks_begin_at_whole_tiles_so_that_their_scores_are_the_whole_ones(monkeypatch):
    """A tile with one large query sums its exponentials another way: its rows are the same ones in every chunk."""
    proxies, groups = 3, 130
    q, k = torch.randn(groups * proxies, 1, 1, 8).half(), torch.randn(40, 1, 1, 8).half()
    q[proxies * 40] *= 2000
    options = {"kv_block_size": 8, "proxies": proxies, "backend": "triton"}
    whole = block_scores(q, k, **options)
    monkeypatch.setattr(launch, "_SCRATCH_BYTES", 50 * proxies * 5 * 4)
    chunks = list(launch.chunks(q, 40, kv_block_size=8, proxies=proxies))
    assert len(chunks) > 1
    assert sum(chunk.groups for chunk in chunks) == groups
    assert {chunk.first_group * proxies % launch._partial_tile(q).block_m for chunk in chunks} == {0}
    assert torch.equal(chunked_block_scores(q, k, **options).whole(), whole)


def test_strided_inputs_and_a_negative_scale_are_fine():
    q, k = torch.randn(2, 6, 2, 8).half().transpose(0, 1), torch.randn(8, 2, 50, 2).half().permute(2, 1, 3, 0)
    arguments = {"kv_block_size": 16, "proxies": 2, "softmax_scale": -0.7}
    got = block_scores(q.unflatten(2, (1, 2)).squeeze(2), k, backend="triton", **arguments)
    torch.testing.assert_close(got, block_scores(q.double(), k.double(), **arguments), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["mass", "lse", "max"])
def test_a_valid_nan_shows_up(reduction):
    q, k = torch.randn(2, 1, 1, 16).half(), torch.randn(64, 1, 1, 16).half()
    k[5] = torch.nan
    got, exact = (block_scores(q, k, kv_block_size=32, reduction=reduction, backend=backend)
                  for backend in ("triton", "reference"))
    assert exact.isnan().any()
    assert torch.equal(got.isnan(), exact.isnan())


def test_nothing_to_score_is_empty():
    q, k = torch.zeros(0, 1, 2, 16).half(), torch.zeros(0, 1, 2, 16).half()
    assert block_scores(q, torch.zeros(9, 1, 2, 16).half(), kv_block_size=4, backend="triton").shape == (1, 2, 0, 3)
    assert block_scores(torch.zeros(4, 1, 2, 16).half(), k, kv_block_size=4, backend="triton").shape == (1, 2, 4, 0)


def test_limits_name_the_way_out():
    q, k = torch.randn(2, 1, 1, 16), torch.randn(8, 1, 1, 16)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(NotImplementedError, match=f"TRITON_INTERPRET=1, got {dtype}; use backend='reference'"):
            block_scores(q.to(dtype), k.to(dtype), kv_block_size=4, backend="triton")
    with pytest.raises(NotImplementedError, match="ranks up to 256, got 320; use backend='reference'"):
        block_scores(torch.zeros(2, 1, 1, 320), torch.zeros(8, 1, 1, 320), kv_block_size=4, backend="triton")
    leaf = q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"no backward; call it under torch.no_grad\(\) or use backend="):
        block_scores(leaf, k, kv_block_size=4, backend="triton")
    with torch.no_grad():
        assert not block_scores(leaf, k, kv_block_size=4, backend="triton").requires_grad
    wide = torch.zeros(1, 65536, 1, 16)
    for refused in (lambda: block_scores(wide, wide, kv_block_size=4, backend="triton"),
                    lambda: pool_queries(wide, q_block_size=1, backend="triton")):
        with pytest.raises(NotImplementedError, match="batch x heads up to 65535, got a grid of"):
            refused()


def test_heads_two_billion_elements_apart_are_found():
    # Pages that nothing touches cost nothing, and MAP_NORESERVE asks for no promise of them.
    stride = 2**30
    room = mmap.mmap(-1, 2 * (2 * stride + 2**16), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    q = torch.frombuffer(room, dtype=torch.float16).as_strided((24, 1, 3, 16), (16, 16, stride, 1))
    q.copy_(torch.randn(24, 1, 3, 16))
    got, exact = (pool_queries(q, q_block_size=8, proxies=2, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("given", "means"), [(90, 40), (-7, 0)])
def test_a_length_that_no_host_checked_reads_no_key_outside(given, means):
    buffer = torch.full((128, 1, 1, 16), torch.nan, dtype=torch.float16)
    buffer[:40] = torch.randn(40, 1, 1, 16)
    results = []
    for number in (given, means):
        length = torch.full((1, 1), number, dtype=torch.int32)
        pooled = launch.pool_queries(buffer[:40], length[0], q_block_size=16, proxies=1)
        assert pooled.isfinite().all()
        results.append((pooled, *(launch.block_scores(torch.ones_like(pooled), buffer[:40], length, kv_block_size=16,
                                                      proxies=1, reduction=reduction, softmax_scale=0.3)
                                  for reduction in ("mass", "max"))))
    assert all(torch.equal(got, exact) for got, exact in zip(*results))
