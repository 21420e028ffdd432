"""One rank of the context-parallel GPU test: every split of this launch's ranks against fp64, in bf16 over NCCL.

Run by torch.distributed.run. Without a GPU it does the same in fp32 over gloo, at a size that a CPU can carry.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from cp_cases import PROXIES, SCALE, Problem, Whole, make_plan, run_block, share

from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.testing.attention_oracle import rounded_reference


def problems(ranks: int, on_gpu: bool) -> list[Problem]:
    """Blocks, tokens, and the dense block; padding ends inside a block."""
    chunk, size, head_dim = (1024, 128, 64) if on_gpu else (32, 8, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    common = {"ranks": ranks, "chunk": chunk, "head_dim": head_dim, "group": size, "dtype": dtype, "units": 3}
    return [Problem(**common, kv_block=size, padding=size + 3),
            Problem(**common, kv_block=1, ratio=2, batch=1, padding=5),
            Problem(**common, kv_block=size, ratio=2, dense=True, padding=size + 3)]


def check(scheme: HybridScheme, whole: Whole, plan, rounded: tuple[torch.Tensor, ...]) -> None:
    """Each part of the keys is rounded once more than in one process; twice that is the budget."""
    parts = 1 + min(plan.stages, plan.g_s - 1)
    ranks, rank = whole.problem.ranks, scheme.manager.rank
    results = run_block(scheme, whole, plan)
    again = run_block(scheme, whole, plan)
    for name, got, repeat, low, exact in zip(("out", "dq", "dk", "dv"), results, again, rounded, whole.answer):
        rounding = torch.finfo(got.dtype).eps * exact.abs().max()
        budget = 2 * parts * ((low.double() - exact).abs().max() + rounding)
        error = (got.double().cpu() - share(exact, rank, ranks)).abs().max()
        assert error <= budget, f"rank {rank}, {name} of {plan}: error {error:.3e}, budget {budget:.3e}"
        assert plan.sparse is False or plan.kv_block == 1 or torch.equal(got, repeat), f"{name} of {plan} not repeated"


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = dist.get_world_size()
    kernels = Kernels(sparse_backend="triton" if on_gpu else "reference",
                      dense_backend="sdpa" if on_gpu else "reference")
    manager = CPGroupManager(dist.group.WORLD, node_ranks=ranks, device=device)
    manager.prepare(splits(ranks, ranks))
    checked = 0
    for problem in problems(ranks, on_gpu):
        whole = Whole(problem)
        inputs = (x.to(problem.dtype) for x in (whole.dout, whole.q, whole.k, whole.v))
        rounded = rounded_reference(*inputs, whole.token_mask(), SCALE)
        scheme = HybridScheme(manager, range(problem.heads), tp_rank=0, proxies=PROXIES, kernels=kernels)
        for number, split in enumerate(splits(ranks, ranks)):
            check(scheme, whole, make_plan(split, problem, stages=1 + number % 2, seed=number), rounded)
            checked += 1
    if dist.get_rank() == 0:
        print(f"checked {checked} plans on {ranks} {device.type} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
