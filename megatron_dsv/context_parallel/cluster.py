"""A cluster as the cost model sees it: GPUs, their links, and how fast both were measured to be.

One YAML file describes one cluster; ``configs/cluster/`` has some. Units stand in the keys: GB/s are 1e9 bytes a second
in one direction for one GPU, microseconds are those of a collective.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_dsv import presets


@dataclass(frozen=True)
class Link:
    """Time of an all-to-all: ``latency_us + peer_us (g - 1) + bytes / gbps`` for g ranks.

    Attributes:
        gbps: GB/s of remote payload that one GPU sends while it receives as much.
        latency_us: microseconds of a collective that moves nothing.
        peer_us: microseconds that each peer after the first adds.
    """

    gbps: float
    latency_us: float
    peer_us: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """One kind of GPU in nodes of one size.

    Attributes:
        name: of the file.
        gpu: name of the device whose kernel times are taken (``kernels/timings.py``), as torch gives it.
        kernel_speed: speed of this cluster's attention kernels in terms of that device's.
        gpus_per_node: GPUs joined by ``node_link``.
        nodes: nodes of the cluster.
        memory_gib: memory of a GPU that a process can use.
        peak_tflops: dense bf16 peak, the denominator of MFU.
        gemm_efficiency: share of the peak that large matrix products reach when sustained.
        hbm_gbps: GB/s read plus written by a large copy.
        node_link, network: links inside a node and between nodes, for one GPU.
        overlap: share of an exchange that attention running beside it hides.
        communicator_mib: memory of one communicator on one GPU.
    """

    name: str
    gpu: str
    kernel_speed: float
    gpus_per_node: int
    nodes: int
    memory_gib: float
    peak_tflops: float
    gemm_efficiency: float
    hbm_gbps: float
    node_link: Link
    network: Link
    overlap: float
    communicator_mib: int

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.gpus_per_node * self.nodes

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines in the number that ``gpus`` takes; less than a node is one smaller node.

        Raises:
            ValueError: neither a part of one node nor whole nodes.
        """
        if gpus < 1 or (gpus > self.gpus_per_node and gpus % self.gpus_per_node):
            raise ValueError(f"the number of GPUs must be at most one node, {self.gpus_per_node}, or a multiple of it, "
                             f"got {gpus}")
        per_node = min(gpus, self.gpus_per_node)
        return dataclasses.replace(self, gpus_per_node=per_node, nodes=gpus // per_node)


def load(reference: str) -> Cluster:
    """The cluster of a YAML file, or of a file in ``configs/cluster/`` by its name.

    Raises:
        ValueError: one line that names the file and the key.
    """
    path = Path(reference) if reference.endswith((".yaml", ".yml")) else _packaged(reference)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cluster {reference}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cluster {reference}: cannot be read: it is not text in UTF-8") from None
    except yaml.YAMLError as error:
        raise ValueError(f"cluster {reference}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cluster {reference}: must be a mapping of keys to values, got {type(content).__name__}")
    return _build(Cluster, {"name": path.stem, **content}, f"cluster {path.name}")


def names() -> list[str]:
    """Packaged clusters."""
    return [name.partition("/")[2] for name in presets.names() if name.startswith("cluster/")]


def _packaged(reference: str) -> Path:
    if reference.removeprefix("cluster/") not in names():
        raise ValueError(f"no cluster {reference!r}; clusters: {', '.join(names())}; a file needs its .yaml ending")
    return presets.path(f"cluster/{reference.removeprefix('cluster/')}")


_ANY_NUMBER_FROM_ZERO = ("latency_us", "peer_us")
_SHARES = ("gemm_efficiency", "overlap")
_LEAST, _MOST = 1e-6, 1e9
"""Of every number but 0: costs stay finite, and hardware lies far inside."""


def _build(kind: type, content: dict[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0].replace('_', '-')!r}; keys: "
                         f"{', '.join(name.replace('_', '-') for name in fields)}")
    missing = [name for name, field in fields.items() if name not in values and field.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where}: key {missing[0].replace('_', '-')!r} is missing")
    for name, value in values.items():
        key = f"{where}: {name.replace('_', '-')}"
        if fields[name].type == "Link":
            if not isinstance(value, dict):
                raise ValueError(f"{key} must be a mapping with gbps, latency-us and peer-us, got {value!r}")
            values[name] = _build(Link, value, key)
        elif fields[name].type == "str":
            if not isinstance(value, str) or not value:
                raise ValueError(f"{key} must be text, got {value!r}")
        else:
            values[name] = _number(fields[name].type, name, value, key)
    return kind(**values)


def _number(kind: Any, name: str, value: Any, key: str) -> float:
    whole = kind == "int"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a {'whole ' if whole else ''}number, got {value!r}")
    low_ok = value >= 0 if name in _ANY_NUMBER_FROM_ZERO or name == "overlap" else value > 0
    if not low_ok or (name in _SHARES and value > 1):
        allowed = "in [0, 1]" if name == "overlap" else "in (0, 1]" if name in _SHARES else \
            "at least 0" if name in _ANY_NUMBER_FROM_ZERO else "above 0"
        raise ValueError(f"{key} must be {allowed}, got {value!r}")
    if value and not _LEAST <= value <= _MOST:
        raise ValueError(f"{key} must be between {_LEAST:g} and {_MOST:g}, got {value!r}; its unit stands in the key")
    return value if whole else float(value)
