"""Every own kernel once over small, awkward shapes, for compute-sanitizer: what it reads and writes must be its own.

    compute-sanitizer --tool memcheck python tests/gpu/memcheck_sweep.py [--part i/n]

Tensors are allocated one by one (PYTORCH_NO_CUDA_MEMORY_CACHING=1, set here), so that a read a byte beyond one is
seen. A first run without the sanitizer fills Triton's cache, which makes the second one several times shorter.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from megatron_dsv.kernels.attention_profile.api import block_mass, smallest_set
from megatron_dsv.kernels.block_scores.api import REDUCTIONS, block_scores, pool_queries
from megatron_dsv.kernels.predictor_loss import api as loss
from megatron_dsv.kernels.sparse_attention import api as attention
from megatron_dsv.kernels.sparse_attention.triton import launch
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.selection_rules import RULES, select
from megatron_dsv.testing.attention_oracle import AttentionCase, random_qkv, random_selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A CPU, with TRITON_INTERPRET=1, shows that the sweep itself is sound."""
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def attend(d: int, q_block: int, kv_block: int, *, hopper: bool = True, deterministic: bool = False,
           dtype: torch.dtype = DTYPE) -> None:
    """Forward and backward over rows of any count, a ragged tail, padding and two query heads a key/value head."""
    case = AttentionCase(s=250, sk=330, b=2, h=4, heads_kv=2, d=d, q_block=q_block, kv_block=kv_block, kv_padding=37)
    selection, _ = random_selection(case, device=DEVICE)
    q, k, v, dout = random_qkv(case, dtype=dtype, device=DEVICE)
    fits = launch._fits_hopper
    launch._fits_hopper = fits if hopper else lambda *_: False
    try:
        out, lse = attention.forward(q, k, v, selection, backend="triton")
        attention.backward(dout, q, k, v, out, lse, selection, backend="triton", deterministic=deterministic)
    finally:
        launch._fits_hopper = fits


def score(kv_block: int, proxies: int, reduction: str) -> None:
    """Scores of single groups over a ragged tail, one item without keys."""
    q, k = _low_rank(37 * proxies, 330)
    lengths = torch.tensor([[330, 64], [1, 0]], dtype=torch.int32, device=DEVICE)
    block_scores(q, k, kv_block_size=kv_block, proxies=proxies, reduction=reduction, kv_length=lengths,
                 backend="triton")


def choose(rule: str, kv_block: int) -> None:
    """Rows of every rule, and the transposed lists."""
    keys, q_block = 900, 64
    scores = torch.rand(2, 4, -(-keys // q_block), -(-keys // kv_block), device=DEVICE)
    lengths = torch.tensor([[keys, keys - 5], [17, keys]], dtype=torch.int32, device=DEVICE)
    select(scores, rule=rule, num_kv_heads=2, num_queries=keys, num_keys=keys, q_block_size=q_block,
           kv_block_size=kv_block, theta=0.75, head_budgets=[1, 3, scores.shape[-1], 7], kv_length=lengths,
           query_length=torch.tensor([keys, 100], device=DEVICE)).with_transposed()


def choose_tokens(proxies: int, reduction: str) -> None:
    """Token lists of any budget."""
    q, k = _low_rank(9 * proxies, 1100)
    token_topk(q, k, head_budgets=[1, 300, 1099, 40], num_queries=9 * 128 - 5, q_block_size=128, proxies=proxies,
               reduction=reduction, kv_length=torch.tensor([[1100, 64], [1, 900]], device=DEVICE, dtype=torch.int32),
               query_length=torch.tensor([1000, 130], device=DEVICE), prefix_tokens=3, backend="triton")


def learn(d: int, rank: int) -> None:
    """Sums and gradients of the predictor loss."""
    q_lr, k_lr = _low_rank(33, 700, rank)
    q = torch.randn(33, 2, 4, d, device=DEVICE, dtype=DTYPE)
    k = torch.randn(700, 2, 2, d, device=DEVICE, dtype=DTYPE)
    lengths = torch.tensor([[700, 64], [1, 333]], dtype=torch.int32, device=DEVICE)
    sums = loss.row_sums(q_lr, k_lr, q, k, lengths, backend="triton")
    coefficients = torch.rand(4, *sums.shape[1:], device=DEVICE)
    loss.row_gradients(q_lr, k_lr, q, k, lengths, coefficients, backend="triton")


def profile(d: int, kv_block: int) -> None:
    """Mass of blocks and the smallest set."""
    q = torch.randn(3 * 64, 2, 4, d, device=DEVICE, dtype=DTYPE)
    k = torch.randn(700, 2, 2, d, device=DEVICE, dtype=DTYPE)
    lengths = torch.tensor([[700, 64], [1, 333]], dtype=torch.int32, device=DEVICE)
    mass = block_mass(q, k, valid_rows=torch.rand(192, 2, device=DEVICE) < 0.9, kv_length=lengths, q_block_size=64,
                      kv_block_size=kv_block, softmax_scale=0.1, backend="triton")
    smallest_set(mass, 0.9, backend="triton")


def pool() -> None:
    """Proxy queries of a ragged last group."""
    pool_queries(_low_rank(250, 1)[0], q_block_size=64, proxies=4, query_length=torch.tensor([250, 70], device=DEVICE))


def _low_rank(queries: int, keys: int, rank: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(n, 2, heads, rank, device=DEVICE, dtype=DTYPE)
                 for n, heads in ((queries, 4), (keys, 2)))


def cases() -> list[Callable[[], None]]:
    """The sweep."""
    found: list[Callable[[], None]] = [pool]
    for d in (64, 96, 128, 256):
        for blocks in ((64, 64), (128, 128), (128, 1)):
            found.append(functools.partial(attend, d, *blocks))
    for blocks in ((64, 64), (128, 128)):
        found.append(functools.partial(attend, 128, *blocks, hopper=False))
    for d, blocks in ((100, (64, 64)), (128, (128, 64)), (128, (64, 128)), (64, (24, 40))):
        found.append(functools.partial(attend, d, *blocks))
    found += [functools.partial(attend, 128, 128, 1, deterministic=True),
              functools.partial(attend, 128, 64, 64, dtype=torch.float16),
              functools.partial(attend, 64, 64, 64, dtype=torch.float32)]
    found += [functools.partial(score, kv_block, proxies, reduction) for reduction in REDUCTIONS
              for kv_block, proxies in ((64, 4), (128, 1), (40, 3))]
    found += [functools.partial(choose, rule, kv_block) for rule in sorted(RULES) for kv_block in (64, 1)]
    found += [functools.partial(choose_tokens, *options) for options in ((4, "mass"), (1, "max"), (2, "lse"))]
    found += [functools.partial(learn, *shape) for shape in ((128, 16), (96, 40))]
    found += [functools.partial(profile, *shape) for shape in ((128, 64), (96, 1))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts, from 1.")
    index, count = map(int, parser.parse_args().part.split("/"))
    mine = cases()[index - 1::count]
    for case in mine:
        case()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(case, flush=True)
    print(f"ran {len(mine)} cases")


if __name__ == "__main__":
    main()
