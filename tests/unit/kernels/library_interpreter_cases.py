"""Cases of the library backends of sparse attention on the CPU: lists by the Triton interpreter, kernels by stand-ins.

The stand-ins take what the libraries take, in their layouts, and compute it naively; so these cases prove the
arguments: lists, counts, masks, chunks of heads, views of outputs. test_block_rectangles.py runs them in their own
process.
"""

import sys
import types
from collections import namedtuple

import pytest
import torch

from megatron_dsv.kernels.sparse_attention import api, cudnn, flash4, head_chunks
from megatron_dsv.kernels.sparse_attention.triton import rectangle
from megatron_dsv.testing.attention_oracle import AttentionCase, oracle, random_qkv, random_selection

Blocks = namedtuple("Blocks", "mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size")


def _listed(counts, indices, blocks):
    """bool [*rows, blocks] of the first ``counts`` entries of each row of indices [*rows, W]."""
    mask = torch.zeros(*counts.shape, blocks, dtype=torch.bool)
    for row in torch.cartesian_prod(*map(torch.arange, counts.shape)).reshape(-1, counts.dim()).tolist():
        entries = indices[tuple(row)][: int(counts[tuple(row)])].tolist()
        assert entries == sorted(set(entries))
        assert all(0 <= entry < blocks for entry in entries)
        mask[tuple(row)][entries] = True
    return mask


def _tokens(mask, q_block, kv_block, s, sk):
    return mask.repeat_interleave(q_block, 2)[:, :, :s].repeat_interleave(kv_block, 3)[..., :sk]


def _gradients(q, k, v, out, dout, mask, scale, lse):
    """dq, dk, dv of [s, b, h, d] tensors under a token mask, from out and lse as given."""
    repeat = q.shape[2] // k.shape[2]
    q, out, dout = (x.double().permute(1, 2, 0, 3) for x in (q, out, dout))
    k, v = (x.double().permute(1, 2, 0, 3).repeat_interleave(repeat, 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    probs = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    dscores = probs * (dout @ v.mT - (out * dout).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (-1, repeat)).sum(2) for x, y in ((dscores, q), (probs, dout)))
    return tuple(x.permute(2, 0, 1, 3) for x in (dscores @ k, dk, dv))


class _Flash4:
    @staticmethod
    def _mask(blocks, lengths, s, sk, by_key):
        (q_block, kv_block), rows = blocks.block_size, -(-s // blocks.block_size[0])
        columns = rows if by_key else -(-sk // kv_block)
        whole = _listed(blocks.full_block_cnt, blocks.full_block_idx, columns)
        cut = _listed(blocks.mask_block_cnt, blocks.mask_block_idx, columns)
        assert not (whole & cut).any()
        whole, cut = (_tokens(x.transpose(2, 3) if by_key else x, q_block, kv_block, s, sk) for x in (whole, cut))
        below = torch.arange(sk) < lengths[:, :, None, None]
        assert not (whole & ~below).any(), "a block with padding in it must be masked"
        return whole | (cut & below)

    @classmethod
    def forward(cls, q, k, v, *, softmax_scale, out, lse, block_sparse_tensors, mask_mod, aux_tensors):
        mask = cls._mask(block_sparse_tensors, aux_tensors[0], q.shape[1], k.shape[1], False)
        got, got_lse = oracle(*(x.transpose(0, 1).double() for x in (q, k, v)), mask, softmax_scale)
        out.copy_(got.transpose(0, 1))
        lse.copy_(got_lse)

    @classmethod
    def backward(cls, q, k, v, out, dout, lse, *, softmax_scale, dq, dk, dv, block_sparse_tensors, mask_mod,
                 aux_tensors):
        mask = cls._mask(block_sparse_tensors, aux_tensors[0], q.shape[1], k.shape[1], True)
        grads = _gradients(*(x.transpose(0, 1) for x in (q, k, v, out, dout)), mask, softmax_scale, lse)
        for given, grad in zip((dq, dk, dv), grads):
            given.copy_(grad.transpose(0, 1))


class _Cudnn:
    @staticmethod
    def _mask(indices, counts, sizes, block, s, sk):
        assert indices.shape[-1] % cudnn._WIDTH == 0
        listed = _tokens(_listed(counts, indices, -(-sk // block)), block, block, s, sk)
        place = torch.arange(sk) % block
        return listed & (place < sizes.repeat_interleave(block, -1)[..., :sk])[:, :, None]

    @classmethod
    def forward(cls, q, k, v, indices, *, block_sizes, q2k_block_nums, sparse_block_size, allow_empty_block_nums,
                softmax_scale, layout):
        assert (layout, allow_empty_block_nums, block_sizes.dim()) == ("bshd", True, 3)
        mask = cls._mask(indices, q2k_block_nums, block_sizes, sparse_block_size, q.shape[1], k.shape[1])
        got, got_lse = oracle(*(x.transpose(0, 1).double() for x in (q, k, v)), mask, softmax_scale)
        return {"o_tensor": got.transpose(0, 1).contiguous().to(q.dtype), "lse_tensor": got_lse.float()}

    @classmethod
    def backward(cls, dout, q, k, v, out, lse, indices, *, block_sizes, q2k_block_nums, softmax_scale, dq_tensor,
                 dk_tensor, dv_tensor, sparse_block_size):
        assert block_sizes.dim() == 2
        mask = cls._mask(indices, q2k_block_nums, block_sizes[:, None], sparse_block_size, q.shape[2], k.shape[2])
        grads = _gradients(*(x.permute(2, 0, 1, 3) for x in (q, k, v, out, dout)), mask, softmax_scale, lse)
        for given, grad in zip((dq_tensor, dk_tensor, dv_tensor), grads):
            given.copy_(grad.permute(1, 2, 0, 3))


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    for module in (flash4, cudnn):
        monkeypatch.setattr(module, "hopper_limit", lambda backend, x: None)
    monkeypatch.setattr(flash4, "_below_length", lambda: None)
    modules = {
        "flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": Blocks},
        "flash_attn.cute.interface": {"_flash_attn_fwd": _Flash4.forward, "_flash_attn_bwd": _Flash4.backward},
        "cudnn": {}, "cudnn.block_sparse_attention": {"block_sparse_attention_forward": _Cudnn.forward,
                                                      "block_sparse_attention_backward": _Cudnn.backward}}
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("backend", "block", "d", "heads_kv", "chunked"), [
    ("flash4", 128, 64, 2, False), ("flash4", 128, 256, 4, True), ("cudnn", 64, 128, 4, False),
    ("cudnn", 128, 128, 4, True)])
def test_what_the_libraries_are_asked_is_the_selection(backend, block, d, heads_kv, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(head_chunks, "RECTANGLE_ENTRIES", 1)
        monkeypatch.setattr(cudnn, "_SMALL_WORKSPACE", 1)
    heads_at_once, lists = [], rectangle.by_query
    monkeypatch.setattr(rectangle, "by_query", lambda selection, heads, **options: (
        heads_at_once.append(heads.stop - heads.start), lists(selection, heads, **options))[1])
    case = AttentionCase(s=256, sk=330, b=1 + (d == 64), h=4, heads_kv=heads_kv, d=d, q_block=block, kv_block=block,
                         kv_padding=31)
    selection, _ = random_selection(case, seed=block)
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16)
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for name in (backend, "reference"):
            out, lse = api.forward(q, k, v, selection, backend=name)
            results.append((out, lse, *api.backward(dout, q, k, v, out, lse, selection, backend=name)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert heads_at_once
    assert set(heads_at_once) == {1} if chunked else max(heads_at_once) == 4
    for mine, exact in zip(*results):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, exact, rtol=2**-6, atol=2**-8)
