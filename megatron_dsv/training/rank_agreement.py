"""What all ranks of a run must find alike before it begins.

Ranks decide alone what they do alike: which layers attend sparsely, which samples come next, which ranks share a node.
Where they decide by facts that differ between hosts, they call different collectives, and wait for each other for ever.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import megatron_dsv
from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import from_args
from megatron_dsv.context_parallel.plan_modes import HEADS, SEQUENCE
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.kernels.library import PACKAGES, installed
from megatron_dsv.kernels.timings import DENSE
from megatron_dsv.training.cp_runtime import topology_of
from megatron_dsv.training.run_config import names_path
from megatron_dsv.transformer.selector import device_name

_MOST_NAMED = 3
"""Hosts, and ranges of ranks, that a message names for each value."""


class RanksDifferError(ValueError):
    """Ranks that would not run the same program, in one line."""


class Fact(NamedTuple):
    """What a rank found.

    Attributes:
        value: for the message, and to be compared.
        cure: the way out, where ranks differ.
    """

    value: str
    cure: str


def facts_of(args: argparse.Namespace, latents: LatentDataset) -> dict[str, Fact]:
    """What this rank found, by name; only what its run depends on.

    Args:
        args: parsed arguments.
        latents: the data set.
    """
    versions = [f"megatron-dsv {megatron_dsv.__version__}",
                *(f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "torch"))]
    facts = {"their software": Fact(", ".join(versions), "install the same versions on every host"),
             "the data set": Fact(f"{len(latents)} samples with index {latents.digest[:12]}",
                                  "give every host the same --latent-data")}
    # A path may be spelt otherwise on another host.
    facts |= {f"--{key}": Fact(str(value), "give every rank the same flags and configuration files")
              for key, value in args.launch_settings.items() if not names_path(key)}
    dsv = from_args(DSVConfig, args)
    return facts | _layout_facts(args, dsv) | _dispatch_facts(dsv)


def _layout_facts(args: argparse.Namespace, dsv: DSVConfig) -> dict[str, Fact]:
    """What the groups and the plans of context parallelism follow from."""
    if args.context_parallel_size == 1:
        return {}
    topo, alike = topology_of(args), "start as many ranks on every host"
    if dsv.dsv_cp_plan in (SEQUENCE, HEADS):
        return {"the context-parallel ranks of a host": Fact(
            str(topo.cp_per_node), f"{alike}, or take --context-parallel-size 1")}
    return {"the number of ranks on their host": Fact(str(topo.domain), f"{alike}, or take --dsv-cp-plan sequence")}


def _dispatch_facts(dsv: DSVConfig) -> dict[str, Fact]:
    """What decides that a layer is sparse, where measured times do: windows, and devices without any, ask for none."""
    if not (dsv.has_predictor and dsv.may_be_sparse) or dsv.dsv_dense_above is not None:
        return {}
    device = device_name()
    kind = device if device in DENSE else None
    found = {"the kind of GPU": (kind or "one that was not measured", "take hosts of one kind")}
    if kind is not None:
        packages = [package for backend, package in PACKAGES.items() if installed(backend)]
        found["the attention packages"] = ", ".join(packages) or "none", "install the same ones on every host"
    return {name: Fact(value, f"{cure}, or let --dsv-dense-above alone say which layers are dense")
            for name, (value, cure) in found.items()}


def check_agreement(mine: Mapping[str, Fact]) -> None:
    """To be called by every rank of the default process group, once, before anything is built on the facts.

    Raises:
        RanksDifferError: on every rank, about the first fact in which any two differ.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (socket.gethostname(), dict(mine)))
    names = dict.fromkeys(name for _, facts in everyone for name in facts)
    for name in names:
        found = [facts.get(name) for _, facts in everyone]
        ranks_of: dict[str, list[int]] = {}
        for rank, fact in enumerate(found):
            ranks_of.setdefault("nothing" if fact is None else fact.value, []).append(rank)
        if len(ranks_of) > 1:
            hosts = [host for host, _ in everyone]
            got = ", ".join(f"{value} on {_where(ranks, hosts)}" for value, ranks in ranks_of.items())
            cure = next(fact.cure for fact in found if fact is not None)
            raise RanksDifferError(f"all ranks must have {name} in common, got {got}; {cure}")


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ascending ranks with their hosts: ``ranks 0-7, 16 (node1, node3)``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    numbers = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    named = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {_few(numbers)} ({_few(named)})"


def _few(words: Sequence[str]) -> str:
    more = len(words) - _MOST_NAMED
    return ", ".join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
