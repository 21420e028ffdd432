"""Measures the rows of megatron_dsv/kernels/timings_h200.py: backends of dense and sparse attention, and selection.

    python benchmarks/bench_timings.py --output rows.json [--only dense,sparse,selection] [--backends flash4,cudnn]
        [--granularities 128x128,64x64] [--head-dims 128,64] [--tokens 16384,65536]

Prints the rows as Python source. Lists are random, ascending, and of equal counts; each number is the mean of a loop of
``--point-seconds`` after a warm-up, with the clock of a GPU that has been busy since the start of the run. A backend
that refuses a shape is left out. What a backend computes is checked elsewhere (tests/gpu).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpus import need_gpus
from torch import Tensor

from megatron_dsv.kernels.block_scores.api import chunked_block_scores, pool_queries
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import api as sparse
from megatron_dsv.kernels.timing_rows import DenseRow, SelectionRow, SparseRow
from megatron_dsv.sparsity.selection_rules import select

# (tokens, heads) by head dim.
SHAPES = {
    128: [(4096, 24), (8192, 24), (16384, 24), (32768, 24), (65536, 24), (4096, 3), (16384, 3), (65536, 3)],
    64: [(4096, 24), (16384, 24), (65536, 24)],
    96: [(4096, 24), (16384, 24), (65536, 24)],
    256: [(4096, 24), (16384, 24), (65536, 24)],
}
DENSITIES = {128: (0.05, 0.1, 0.3, 0.7), 64: (0.1, 0.4), 96: (0.1, 0.4), 256: (0.1, 0.4)}
GRANULARITIES = {(64, 64): ("triton", "cudnn"), (128, 128): ("triton", "flash4", "cudnn"), (128, 1): ("triton",)}
RANK, PROXIES = 16, 4
Row = DenseRow | SparseRow | SelectionRow


def milliseconds(seconds: float, run: Callable, *args, **kwargs) -> float:
    """Mean time of ``run(*args, **kwargs)`` over a loop of about ``seconds``."""
    run(*args, **kwargs)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats, elapsed = 2, 0.0
    for _ in range(2):
        start.record()
        for _ in range(repeats):
            run(*args, **kwargs)
        stop.record()
        stop.synchronize()
        elapsed = start.elapsed_time(stop) / repeats
        repeats = max(3, math.ceil(seconds * 1e3 / max(elapsed, 1e-3)))
    return elapsed


def random_lists(tokens: int, heads: int, q_block: int, kv_block: int, density: float) -> KVSelection:
    """Every row lists the same number of random blocks; with the key-major twin, which tokens do not use."""
    groups, blocks = -(-tokens // q_block), -(-tokens // kv_block)
    count = max(1, round(density * blocks))
    rows = [torch.rand(groups, blocks, device="cuda").topk(count, sorted=False).indices.sort().values.int()
            for _ in range(heads)]
    start = torch.arange(heads * groups, device="cuda").reshape(1, heads, groups) * count
    selection = KVSelection(
        kv_indices=torch.stack(rows).reshape(-1), row_start=start,
        row_count=torch.full_like(start, count, dtype=torch.int32),
        kv_length=torch.full((1, heads), tokens, dtype=torch.int32, device="cuda"), num_queries=tokens,
        num_keys=tokens, q_block_size=q_block, kv_block_size=kv_block, max_row_count=count)
    return selection if kv_block == 1 else selection.with_transposed()


def inputs(tokens: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """q, k, v, dout and a plausible out and lse."""
    shape = (tokens, 1, heads, head_dim)
    q, k, v, dout, out = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(5))
    return q, k, v, dout, out, torch.full((1, heads, tokens), math.log(tokens) + 0.5, device="cuda")


def dense_rows(args: argparse.Namespace) -> Iterator[Row]:
    seconds = args.point_seconds
    for head_dim, shapes in SHAPES.items():
        for tokens, heads in shapes:
            if head_dim not in args.head_dims or tokens not in args.tokens:
                continue
            q, k, v, dout, out, lse = inputs(tokens, heads, head_dim)
            for backend in (name for name in ("sdpa", "flash4") if name in args.backends):
                try:
                    times = (milliseconds(seconds, dense.forward, q, k, v, backend=backend),
                             milliseconds(seconds, dense.backward, dout, q, k, v, out, lse, backend=backend))
                except (NotImplementedError, RuntimeError) as error:
                    print(f"# {backend} {tokens} x {heads} x {head_dim}: {str(error)[:160]}", flush=True)
                    continue
                yield DenseRow(backend, tokens, heads, head_dim, *times)


def sparse_rows(args: argparse.Namespace) -> Iterator[Row]:
    seconds = args.point_seconds
    for head_dim, shapes in SHAPES.items():
        for tokens, heads in shapes:
            if head_dim not in args.head_dims or tokens not in args.tokens:
                continue
            q, k, v, dout, out, lse = inputs(tokens, heads, head_dim)
            for (q_block, kv_block), able in GRANULARITIES.items():
                backends = [name for name in able if name in args.backends]
                if not backends or f"{q_block}x{kv_block}" not in args.granularities:
                    continue
                for density in DENSITIES[head_dim]:
                    if tokens > 32768 and density > 0.5:
                        continue
                    lists = random_lists(tokens, heads, q_block, kv_block, density)
                    for backend in backends:
                        try:
                            times = (
                                milliseconds(seconds, sparse.forward, q, k, v, lists, backend=backend),
                                milliseconds(seconds, sparse.backward, dout, q, k, v, out, lse, lists, backend=backend))
                        except (NotImplementedError, RuntimeError) as error:
                            print(f"# {backend} {q_block}x{kv_block} {tokens} x {heads} x {head_dim}: "
                                  f"{str(error)[:160]}", flush=True)
                            continue
                        kept = lists.max_row_count / lists.num_kv_blocks
                        yield SparseRow(backend, q_block, kv_block, tokens, heads, head_dim, kept, *times)


def selection_rows(args: argparse.Namespace) -> Iterator[Row]:
    seconds = args.point_seconds
    for tokens, heads in SHAPES[128]:
        if tokens not in args.tokens:
            continue
        hidden = torch.randn(tokens, heads * 128, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(2 * heads * RANK, heads * 128, dtype=torch.bfloat16, device="cuda")
        for q_block, kv_block in GRANULARITIES:
            if kv_block > 1 and f"{q_block}x{kv_block}" in args.granularities:
                yield SelectionRow(q_block, kv_block, tokens, heads,
                                   milliseconds(seconds, select_blocks, hidden, weight, heads, q_block, kv_block))


def select_blocks(hidden: Tensor, weight: Tensor, heads: int, q_block: int, kv_block: int) -> KVSelection:
    """Projection of hidden [s, hidden] to low-rank queries and keys, scores, choice of a tenth, key-major twin."""
    tokens = hidden.shape[0]
    low_rank = torch.nn.functional.linear(hidden, weight).view(tokens, 1, 2 * heads, RANK)
    pooled = pool_queries(low_rank[:, :, :heads], q_block_size=q_block, proxies=PROXIES)
    scores = chunked_block_scores(pooled, low_rank[:, :, heads:], kv_block_size=kv_block, proxies=PROXIES,
                                  reduction="mass")
    return select(scores, rule="topk", head_budgets=[max(1, round(0.1 * tokens / kv_block))] * heads,
                  num_kv_heads=heads, num_queries=tokens, num_keys=tokens, q_block_size=q_block,
                  kv_block_size=kv_block).with_transposed()


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="dense,sparse,selection")
    parser.add_argument("--backends", type=_words, default=_words("sdpa,flash4,triton,cudnn"))
    parser.add_argument("--granularities", type=_words, default=_words("64x64,128x128,128x1"))
    parser.add_argument("--head-dims", type=_numbers, default=list(SHAPES))
    parser.add_argument("--tokens", type=_numbers, default=[tokens for tokens, _ in SHAPES[128]])
    parser.add_argument("--point-seconds", type=float, default=0.15)
    arguments = parser.parse_args()
    need_gpus(parser, 1)
    parts = {"dense": dense_rows, "sparse": sparse_rows, "selection": selection_rows}
    rows = []
    with torch.no_grad():
        for name in arguments.only.split(","):
            for row in parts[name](arguments):
                rows.append(row)
                values = ", ".join(f"{x:.4g}" if isinstance(x, float) else repr(x).replace("'", '"') for x in row)
                print(f"    {type(row).__name__}({values}),", flush=True)
                arguments.output.write_text(json.dumps([[type(row).__name__, *row] for row in rows], indent=1))


if __name__ == "__main__":
    main()
