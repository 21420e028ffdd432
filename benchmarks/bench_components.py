"""Times what one sparse layer is made of, on one GPU, at the shape of a preset: where does a step go?

    python benchmarks/bench_components.py --output benchmarks/results/h200/components.json

Events around repeated calls after warm-up; medians. Random data: the times of lists of a given length, not their worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_pretrain import versions
from gpus import need_gpus

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.kernels.block_scores.api import block_scores, pool_queries
from megatron_dsv.kernels.dense_attention.api import dense_attention
from megatron_dsv.kernels.sparse_attention.api import sparse_attention
from megatron_dsv.sparsity.predictor_loss import predictor_loss_and_grads
from megatron_dsv.sparsity.sampling import sample_rows
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.transformer.layer_statistics import LayerStatistics
from megatron_dsv.transformer.predictor import LowRankPredictor
from megatron_dsv.transformer.predictor_teacher import PredictorInput, examine, learn
from megatron_dsv.transformer.rope3d import RopeTables
from megatron_dsv.transformer.selector import Selector

PARTS = ("dense", "sparse", "predictor")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=32760)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--keep-ratios", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--blocks", nargs="+", default=["64x64", "128x128"], help="query group x key block.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS),
                        help="what to time; rows of the other parts stay in the output as they were.")
    args = parser.parse_args()
    need_gpus(parser, 1)
    path = Path(args.output)
    facts = {"tokens": args.tokens, "heads": args.heads, "head_dim": args.head_dim, "rank": args.rank,
             "dtype": "bf16", "versions": versions()}
    write_as_they_come(path, facts, rows_of_other_parts(path, args.parts, facts), measured(args))
    return 0


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the parts that were asked for, each when it has been timed."""
    if "dense" in args.parts:
        yield from dense_rows(args)
    if "sparse" in args.parts:
        for blocks in args.blocks:
            q_block, kv_block = (int(size) for size in blocks.split("x"))
            for keep in args.keep_ratios:
                yield from sparse_rows(args, q_block, kv_block, keep)
    if "predictor" in args.parts:
        yield from predictor_rows(args)


def write_as_they_come(path: Path, facts: dict[str, Any], kept: list[dict[str, Any]],
                       rows: Iterable[dict[str, Any]]) -> None:
    """Prints every row; a run that fails leaves those before beside ``path``, which only a whole run replaces."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = list(kept)
    for row in rows:
        print(row, flush=True)
        found.append(row)
        partial.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")
    partial.replace(path)


def rows_of_other_parts(path: Path, parts: list[str], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``path`` holds of the parts that are not timed now.

    Raises:
        ValueError: it was measured at another shape or with other versions.
    """
    if set(parts) == set(PARTS) or not path.exists():
        return []
    stored = json.loads(path.read_text())
    rows = stored.pop("rows")
    if stored != facts:
        raise ValueError(f"{path} holds rows of {stored}, this run is {facts}; name another --output or time all parts")
    return [row for row in rows if part_of(row["what"]) not in parts]


def part_of(what: str) -> str:
    """The part whose function makes a row of this name."""
    if what.startswith("dense attention"):
        return "dense"
    return "predictor" if what.startswith(("predictor loss", "a layer's learning", "profile of")) else "sparse"


def milliseconds(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of ``call`` on the device, in ms."""
    for _ in range(4):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 3)


def inputs(args: argparse.Namespace) -> list[torch.Tensor]:
    shape = (args.tokens, 1, args.heads, args.head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def timed(what: str, attention: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          **facts: Any) -> list[dict[str, Any]]:
    """Forward, and forward with backward less it."""
    dout = torch.randn_like(q)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(q, k, v))
    both = milliseconds(lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), dout))
    return [{"what": f"{what} forward", "ms": forward, **facts},
            {"what": f"{what} backward", "ms": round(both - forward, 3), **facts}]


def dense_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    q, k, v = inputs(args)
    return timed("dense attention", lambda q, k, v: dense_attention(q, k, v, kv_length=args.tokens), q, k, v)


def sparse_rows(args: argparse.Namespace, q_block: int, kv_block: int, keep: float) -> list[dict[str, Any]]:
    q, k, v = inputs(args)
    facts = {"blocks": f"{q_block}x{kv_block}", "keep_ratio": keep}
    blocks = -(-args.tokens // kv_block)
    q_lr, k_lr = torch.randn(2, args.tokens, 1, args.heads, args.rank, device="cuda", dtype=torch.bfloat16)
    pool = lambda: pool_queries(q_lr, q_block_size=q_block, proxies=4, query_length=args.tokens)  # noqa: E731
    pooled = pool()
    score = lambda: block_scores(pooled, k_lr, kv_length=args.tokens, kv_block_size=kv_block,  # noqa: E731
                                 proxies=4, softmax_scale=args.rank**-0.5)
    scores = score()
    choose = lambda: select(scores, rule="topk", num_kv_heads=args.heads, num_queries=args.tokens,  # noqa: E731
                            num_keys=args.tokens, q_block_size=q_block, kv_block_size=kv_block,
                            head_budgets=[max(1, round(keep * blocks))] * args.heads)
    selection = choose().with_transposed()
    return [
        {"what": "pool queries", "ms": milliseconds(pool), **facts},
        {"what": "block scores (mass, 4 proxies)", "ms": milliseconds(score), **facts},
        {"what": "select top-k", "ms": milliseconds(choose), **facts},
        {"what": "key-major twin", "ms": milliseconds(lambda: choose().with_transposed()), **facts},
        *timed("sparse attention", lambda q, k, v: sparse_attention(q, k, v, selection), q, k, v, **facts)]


def predictor_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The loss at the default stride and at one row in 64, all of a layer's learning, and a profile."""
    q, k, _ = (tensor.detach() for tensor in inputs(args))
    scale = args.head_dim**-0.5
    for stride in (256, 64):
        rows = sample_rows(args.tokens, stride, 0, q_block_size=64).cuda()
        q_lr = torch.randn(len(rows), 1, args.heads, args.rank, device="cuda", dtype=torch.bfloat16)
        k_lr = torch.randn(args.tokens, 1, args.heads, args.rank, device="cuda", dtype=torch.bfloat16)
        gate(q_lr, k_lr, q[rows], k, scale)
        yield {"what": f"predictor loss and gradients, {len(rows)} rows",
               "ms": milliseconds(lambda: predictor_loss_and_grads(
                   q_lr, k_lr, q.index_select(0, rows), k, softmax_scale=scale))}  # noqa: B023
    learning, profile = learning_and_profile(args, q, k)
    yield {"what": "a layer's learning, default stride: rows, projections, rotation, loss, weight gradients",
           "ms": milliseconds(learning)}
    yield {"what": "profile of 8 query groups", "ms": milliseconds(profile)}


def learning_and_profile(args: argparse.Namespace, q: torch.Tensor,
                         k: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A layer's predictor learning from q, k [tokens, 1, heads, head size] on their device, and being profiled."""
    device = q.device
    dsv = DSVConfig(dsv_sparse_stage="predictor", dsv_predictor_rank=args.rank)
    hidden = args.heads * args.head_dim
    heads = range(args.heads)
    predictor = LowRankPredictor(layer_number=1, query_heads=heads, key_heads=heads, channels=hidden, rank=args.rank,
                                 input_kind="hidden", seed=1, tp_group=None).to(device)
    x = torch.randn(args.tokens, 1, hidden, device=device, dtype=q.dtype)
    angles = torch.rand(args.tokens, args.rank // 2, device=device)
    source = PredictorInput(x, x, RopeTables(angles, angles, *(angles.cos(), angles.sin()) * 2))
    selector = Selector(dsv, layer_number=1, query_heads=heads, num_kv_heads=args.heads, head_dim=args.head_dim,
                        dtype=q.dtype, statistics=LayerStatistics(args.heads, None))
    common = {"dsv": dsv, "kv_length": torch.tensor([args.tokens], dtype=torch.int32),
              "softmax_scale": args.head_dim**-0.5, "step": 0,
              "scheme": LocalScheme(query_heads=heads, proxies=dsv.dsv_predictor_proxies)}
    return (lambda: learn(predictor, source, q, k, **common),
            lambda: examine(predictor, source, q, k, selector, **common))


def gate(q_lr: torch.Tensor, k_lr: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
    """Refuses to time a loss that is wrong: two heads of it, against fp64 and no further than bf16 rounding."""
    heads = [x[:, :, :2] for x in (q_lr, k_lr, q, k)]
    exact = predictor_loss_and_grads(*(x.double() for x in heads), softmax_scale=scale)
    for mine, right in zip(predictor_loss_and_grads(*heads, softmax_scale=scale), exact, strict=True):
        error = float((mine.double() - right).abs().max() / right.abs().max())
        if not error <= 2**-7:
            raise ValueError(f"the predictor loss is off by {error:.1e} of its largest value: nothing to time")


if __name__ == "__main__":
    raise SystemExit(main())
