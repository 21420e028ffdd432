"""Measures what the cost model takes: kernels, links, and what is left of whole blocks when the model has had its say.

The kernels come from blocks on one rank. On several ranks, the all-to-all, its overlap with attention and the memory of
a communicator follow; then blocks split over sequence and heads, at the same sizes, of which the model explains
kernels and links, and ``Handling`` takes the rest.

Symbols: C ranks.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dsv.context_parallel.calibration import (
    AllToAllRow,
    Calibration,
    Remainder,
    all_to_all_row,
    fit_line,
    fit_links,
    fit_surcharge,
)
from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.context_parallel.cost_model import CostModel, Handling
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels
from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.plan import Topology, even_block
from megatron_dsv.context_parallel.selective_exchange import SelectiveExchange
from megatron_dsv.context_parallel.sparsity_traces import spread_heads
from megatron_dsv.context_parallel.stopwatch import Mark, Program, Stopwatch, Times
from megatron_dsv.context_parallel.trial_block import TrialBlock, TrialShape, make_inputs
from megatron_dsv.context_parallel.trial_predictions import mean_coverage, predicted_ns, stats_of

HEAD_SPREAD = 0.5
"""Spread of the heads' log density, what `dsv plan` assumes: a list is as wide as the densest head."""
_ANY_MEMORY = 2**62
_STAGES = len(TrialBlock.stages)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        shape: of a block; its tokens are replaced by those of ``tokens``.
        tokens: sequence lengths, two at least.
        densities: kept shares, two at least.
        payloads: bytes that a rank sends to others in an all-to-all, two sizes at least.
        seconds: of work for every block, and for every all-to-all a tenth of it.
        dtype: of all tensors.
    """

    shape: TrialShape
    tokens: tuple[int, ...]
    densities: tuple[float, ...]
    payloads: tuple[int, ...]
    seconds: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("tokens", "densities", "payloads"):
            if len(set(getattr(self, name))) < 2:
                raise ValueError(f"{name} of a calibration must be two different sizes at least, "
                                 f"got {list(getattr(self, name))}")


@dataclass
class Microbenchmarks:
    """The measurements of one rank, all ranks together.

    Args:
        sizes: what is measured.
        device: of this rank.
        cluster: what is not measured is taken from here.
        group: all ranks; None for one.
        kernels: backends of attention.
        node_ranks: ranks that share a node; None for all.

    Raises:
        ValueError: tokens that the ranks cannot share out, or nodes of different numbers of ranks.
    """

    sizes: Sizes
    device: torch.device
    cluster: Cluster
    group: dist.ProcessGroup | None = None
    kernels: Kernels = field(default_factory=Kernels)
    node_ranks: int | None = None

    def __post_init__(self) -> None:
        self.ranks = 1 if self.group is None else self.group.size()
        inside = min(self.ranks, self.node_ranks or self.ranks)
        if self.ranks % inside:
            raise ValueError(f"every node of a calibration must run as many ranks, got {self.ranks} ranks in nodes of "
                             f"{inside}")
        self.topo = Topology(self.ranks, domain=inside)
        self.watch = Stopwatch(self.device, self.group)
        shape = self.sizes.shape
        unit = self.ranks * math.lcm(shape.q_block, shape.kv_block)
        for tokens in self.sizes.tokens:
            if tokens < 1 or tokens % unit:
                raise ValueError(f"tokens of a calibration must be multiples of {unit}, of {self.ranks} ranks x query "
                                 f"groups of {shape.q_block} and key blocks of {shape.kv_block}, got {tokens}")

    def calibrate(self) -> Calibration:
        """Measures everything.

        Raises:
            ValueError: sizes that do not fit the number of ranks.
        """
        first, memory = (None, None) if self.group is None else communicator_mib(self.group, self.device)
        kernels, rows = self.kernel_rates()
        measured: dict[str, Any] = {"blocks": rows}
        cluster, handling = self.cluster, Handling()
        if self.group is not None and self.ranks > 1:
            manager = CPGroupManager(self.group, node_ranks=self.ranks, device=self.device)
            splits = [Split(1, self.ranks), Split(self.ranks, 1)]
            manager.prepare(splits)
            links = self.links()
            measured |= {"all_to_all": [row._asdict() for row in links], "first_communicator_mib": first}
            cluster = replace(fit_links(cluster, links), overlap=self.overlap(manager))
            if memory is not None:
                cluster = replace(cluster, communicator_mib=max(1, round(memory)))
            handling, more = self.handling(manager, splits, cluster, kernels)
            measured["blocks"] = rows + more
        shape = self.sizes.shape
        return Calibration(cluster, kernels, handling, shape.q_block, shape.kv_block, shape.head_dim, measured)

    def kernel_rates(self) -> tuple[CalibratedKernels, list[dict[str, Any]]]:
        """Kernels of one rank, every rank for itself, and the rows measured."""
        points: dict[str, list[tuple[float, float]]] = {}
        rows = []
        for shape in self._shapes():
            inputs = make_inputs(shape, self.device, self.sizes.dtype)
            blocks = {density: TrialBlock(shape, inputs, self._scheme(), self._budgets(shape, density))
                      for density in (None, *self.sizes.densities)}
            for density, times in self._timed(blocks).items():
                total, (select, forward, backward) = self.watch.agreed_times(times, _STAGES)
                kept = sum(self._densities(shape, density)) / shape.heads
                pairs = shape.tokens * shape.tokens * shape.heads
                kind = "dense" if density is None else "sparse"
                points.setdefault(f"{kind}_forward", []).append((pairs * shape.head_dim * kept, forward * 1e6))
                points.setdefault(f"{kind}_backward", []).append((pairs * shape.head_dim * kept, backward * 1e6))
                if density is not None:
                    points.setdefault("selection", []).append((pairs, select * 1e6))
                rows.append({"tokens": shape.tokens, "density": kept, "split": [1, 1], "sparse": density is not None,
                             "ms": total, "selection_ms": select, "forward_ms": forward, "backward_ms": backward})
            del inputs, blocks
            self._free()
        return CalibratedKernels(**{name: fit_line(row) for name, row in points.items()}), rows

    def links(self) -> list[AllToAllRow]:
        """All-to-alls of all ranks at every payload."""
        assert self.group is not None
        programs: dict[int, Program] = {}
        for payload in self.sizes.payloads:
            size = max(1, payload // (self.ranks - 1))
            programs[payload] = self._all_to_all(*(torch.zeros(self.ranks * size, dtype=torch.uint8,
                                                               device=self.device) for _ in range(2)))
        times = self.watch.run({str(name): program for name, program in programs.items()}, self.sizes.seconds / 10)
        return [all_to_all_row(self.ranks, self.topo.domain, payload,
                               self.watch.agreed(times[str(payload)].total()) * 1e3) for payload in self.sizes.payloads]

    def overlap(self, manager: CPGroupManager) -> float:
        """Share of the largest all-to-all that dense attention beside it hides, in [0, 1]."""
        sizes = self.sizes
        shape = replace(sizes.shape, tokens=min(sizes.tokens))
        inputs = make_inputs(shape, self.device, sizes.dtype)
        block = TrialBlock(shape, inputs, self._scheme(), None)
        pending = block.begin()
        size = max(1, max(sizes.payloads) // (self.ranks - 1))
        sent, received = (torch.zeros(self.ranks * size, dtype=torch.uint8, device=self.device) for _ in range(2))
        group = manager.sequence_group(Split(1, self.ranks))
        splits = [size] * self.ranks

        @torch.no_grad()
        def attention(mark: Mark) -> None:
            mark()
            block.attend(pending)
            mark()

        def both(mark: Mark) -> None:
            with torch.no_grad():
                mark()
                arrivals = [group.all_to_all(received, sent, splits, splits, "overlap") for _ in range(count)]
                block.attend(pending)
                for arrival in arrivals:
                    arrival.wait()
                mark()

        apart = self.watch.run({"attention": attention, "exchange": self._all_to_all(received, sent)},
                               sizes.seconds / 4)
        alone, exchange = (self.watch.agreed(apart[name].total()) for name in ("attention", "exchange"))
        # As many as attention could hide twice over: one would drown in the noise of a long kernel.
        count = max(1, int(alone / 2 / exchange))
        beside = self.watch.agreed(self.watch.run({"both": both}, sizes.seconds / 4)["both"].total())
        return min(1.0, max(0.0, (alone + count * exchange - beside) / (count * exchange)))

    def handling(self, manager: CPGroupManager, splits: list[Split], cluster: Cluster, kernels: CalibratedKernels
                 ) -> tuple[Handling, list[dict[str, Any]]]:
        """What blocks over all ranks take beyond the model's kernels and links, and the rows measured."""
        shape = self.sizes.shape
        scheme = HybridScheme(manager, range(shape.heads), tp_rank=0, proxies=shape.proxies, kernels=self.kernels)
        known = self._row_rates(scheme, splits[0])
        model = CostModel(cluster, kernels, _ANY_MEMORY, handling=known)
        left: dict[str, list[Remainder]] = {"heads": [], "rows": [], "keys": []}
        rows = []
        for shape in self._shapes():
            inputs = make_inputs(shape, self.device, self.sizes.dtype).share(manager.rank, self.ranks)
            blocks = {(split, density): TrialBlock(
                shape, inputs, scheme, self._budgets(shape, density),
                even_block(0, split, tp=1, units=shape.heads, sparse=density is not None, kv_block=shape.kv_block))
                for split in splits for density in (None, *self.sizes.densities)}
            stats = {density: stats_of(self._densities(shape, density),
                                       None if density is None else blocks[splits[0], density], manager)
                     for density in (None, *self.sizes.densities)}
            for (split, density), times in self._timed(blocks).items():
                total, stages = self.watch.agreed_times(times, _STAGES)
                kept = sum(stats[density].density) / shape.heads
                plan = blocks[split, density].plan
                assert plan is not None
                explained = predicted_ns(model, shape, self.topo, plan, stats[density])
                mine = shape.tokens * shape.heads / self.ranks
                kind = "heads" if split.g_s == 1 else "keys" if density is None else "rows"
                left[kind].append(Remainder(mine, mine * shape.tokens * kept, total * 1e6 - explained, total * 1e6))
                rows.append({"tokens": shape.tokens, "density": kept, "split": [split.g_h, split.g_s],
                             "sparse": density is not None, "ms": total, "explained_ms": explained / 1e6,
                             **{f"{name}_ms": ms for name, ms in zip(TrialBlock.stages, stages)},
                             "coverage": mean_coverage(stats[density], self.ranks)})
            del inputs, blocks
            self._free()
        fitted = {kind: fit_surcharge(found, of_pairs=kind == "rows") for kind, found in left.items()}
        return replace(known, heads=fitted["heads"], rows=fitted["rows"], keys=fitted["keys"]), rows

    def _row_rates(self, scheme: HybridScheme, split: Split) -> Handling:
        """GB/s at which the rows of a selective exchange are packed, and added where they return."""
        shape = replace(self.sizes.shape, tokens=max(self.sizes.tokens))
        inputs = make_inputs(shape, self.device, self.sizes.dtype).share(scheme.manager.rank, self.ranks)
        plan = even_block(0, split, tp=1, units=shape.heads, sparse=True, kv_block=shape.kv_block)
        exchange = TrialBlock(shape, inputs, scheme, self._budgets(shape, max(self.sizes.densities)), plan
                              ).begin().exchange
        assert isinstance(exchange, SelectiveExchange)
        k, v = inputs.k.detach(), inputs.v.detach()
        rows = exchange.send(1, k, v).rows
        total = torch.zeros((1, shape.heads, len(k), 2, shape.head_dim), dtype=torch.float32, device=self.device)

        def timed(work: Callable[[], object]) -> Program:
            def program(mark: Mark) -> None:
                mark()
                work()
                mark()

            return program

        times = self.watch.run({"pack": timed(lambda: exchange.send(1, k, v)),
                                "add": timed(lambda: exchange.add_gradients(1, rows, total))}, self.sizes.seconds / 10)
        size = rows.numel() * rows.element_size()
        # Ranks are asked for different numbers of rows; the slowest rate counts.
        pack, add = (-self.watch.agreed(-size / 1e6 / times[name].total()) for name in ("pack", "add"))
        return Handling(pack_gbps=pack, add_rows_gbps=add)

    def _scheme(self) -> LocalScheme:
        return LocalScheme(range(self.sizes.shape.heads), self.sizes.shape.proxies, self.kernels)

    def _timed(self, blocks: dict[Any, TrialBlock]) -> dict[Any, Times]:
        """Dense blocks among themselves and for longer: beside sparse ones they would find the card cooler than a
        dense run does."""
        found: dict[str, Times] = {}
        for dense in (True, False):
            part: dict[str, Program] = {str(name): block.iterate for name, block in blocks.items()
                                        if (block.budgets is None) == dense}
            found |= self.watch.run(part, self.sizes.seconds * (2 if dense else 1))
        return {name: found[str(name)] for name in blocks}

    def _shapes(self) -> Iterable[TrialShape]:
        return (replace(self.sizes.shape, tokens=tokens) for tokens in self.sizes.tokens)

    def _budgets(self, shape: TrialShape, density: float | None) -> tuple[int, ...] | None:
        return None if density is None else shape.budgets(spread_heads(density, shape.heads, HEAD_SPREAD))

    def _densities(self, shape: TrialShape, density: float | None) -> list[float]:
        """[h] shares that the budgets keep."""
        budgets = self._budgets(shape, density)
        return [1.0 if budgets is None else budgets[head] / shape.blocks for head in range(shape.heads)]

    def _all_to_all(self, output: Tensor, input: Tensor) -> Program:
        def program(mark: Mark) -> None:
            mark()
            dist.all_to_all_single(output, input, group=self.group)
            mark()

        return program

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def communicator_mib(group: dist.ProcessGroup, device: torch.device) -> tuple[float | None, float | None]:
    """Device memory that the first use of ``group``, and then a new communicator of the same ranks, take; None without
    CUDA.

    The new communicator stays: groups are never destroyed.
    """
    def taken(work: Callable[[], None]) -> float:
        torch.cuda.synchronize(device)
        before = torch.cuda.mem_get_info(device)[0]
        work()
        torch.cuda.synchronize(device)
        x = torch.tensor([float(before - torch.cuda.mem_get_info(device)[0])], device=device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        return float(x) / 2**20

    if device.type != "cuda":
        return None, None
    return (taken(lambda: warm(group, device)),
            taken(lambda: warm(dist.new_group(dist.get_process_group_ranks(group)), device)))


def warm(group: dist.ProcessGroup, device: torch.device) -> None:
    """The first collective of each kind."""
    x = torch.zeros(group.size(), device=device)
    dist.all_reduce(x, group=group)
    dist.all_to_all_single(torch.empty_like(x), x, group=group)
