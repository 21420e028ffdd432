"""``dsv doctor``: what is installed, what runs where and why. Exit status 1 if training cannot run at all."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

OK, MISSING, BROKEN = "ok", "missing", "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        state: ok, missing (optional, absent) or broken (what needs it cannot run).
        detail: version, and what it means for a run.
        required: whether training cannot run without it.
    """

    name: str
    state: str
    detail: str
    required: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if something required is missing or broken."""
    findings = [check() for check in CHECKS]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8}{finding.name:{width}}  {finding.detail}")
    bad = [finding.name for finding in findings if finding.required and finding.state != OK]
    print(f"Training cannot run: mend {', '.join(bad)}." if bad else "Training can run on this host.")
    return 1 if bad else 0


def pinned(package: str) -> str:
    """The version range that this project's metadata asks of ``package``, such as ``==0.19.2``."""
    for requirement in importlib.metadata.requires("megatron-dsv") or []:
        name = requirement.split(";")[0].strip()
        if name.startswith(package) and not name[len(package):len(package) + 1].isalnum():
            return name.removeprefix(package)
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loads(module: str) -> str | None:
    """Why a module cannot be imported, or None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken native library may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return None


def _python() -> Finding:
    state = OK if sys.version_info[:2] == (3, 12) else BROKEN
    return Finding("python", state, f"{platform.python_version()} on {platform.machine()}; needs 3.12", required=True)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", MISSING, f"needs {pinned('torch')}", required=True)
    reason = _loads("torch")
    return Finding("torch", BROKEN if reason else OK, reason or f"{version} (wants {pinned('torch')})", required=True)


def _megatron() -> Finding:
    version, wanted = _version("megatron-core"), pinned("megatron-core")
    if version is None:
        return Finding("megatron-core", MISSING, f"needs {wanted}", required=True)
    if f"=={version}" != wanted:
        return Finding("megatron-core", BROKEN, f"{version}; its internals are extended for {wanted}", required=True)
    return Finding("megatron-core", OK, f"{version} (pinned {wanted})", required=True)


def _psutil() -> Finding:
    version = _version("psutil")
    return Finding("psutil", OK if version else MISSING, version or "megatron-core needs it to save checkpoints",
                   required=True)


def _cuda() -> Finding:
    if _loads("torch"):
        return Finding("cuda", BROKEN, "torch does not load")
    import torch

    if not torch.cuda.is_available():
        return Finding("cuda", MISSING, "no GPU: training runs on the CPU with gloo, for tests and demos")
    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return Finding("cuda", OK, f"{torch.version.cuda}, {torch.cuda.device_count()} x {', '.join(sorted(names))}, "
                               f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        return Finding("triton", MISSING, "sparse attention runs on --dsv-sparse-backend reference only")
    reason = _loads("triton")
    if reason:
        return Finding("triton", BROKEN, reason)
    import torch

    where = "sparse attention on the GPU" if torch.cuda.is_available() else \
        "no GPU: only its interpreter (TRITON_INTERPRET=1), for tests"
    return Finding("triton", OK, f"{version}; {where}")


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("transformer-engine", MISSING, "--transformer-impl local, Adam in plain torch; nothing needs it")
    reason = _loads("transformer_engine.pytorch")
    version = _version("transformer-engine")
    return Finding("transformer-engine", BROKEN if reason else OK,
                   reason or f"{version}; --transformer-impl transformer_engine takes its linears, norms and Adam")


def _apex() -> Finding:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex", MISSING, "nothing needs it")
    # The package called apex on the public index is a web framework; megatron-core takes any module of that name.
    if importlib.util.find_spec("apex.optimizers") is None:
        return Finding("apex", BROKEN, "an unrelated package of that name, which megatron-core takes for NVIDIA's when "
                                       "it picks norms; this project's models train beside it; uninstall it")
    return Finding("apex", OK, "NVIDIA's; megatron-core takes its fused Adam if Transformer Engine is absent")


def _optional(name: str, package: str, module: str, use: str, without: str) -> Callable[[], Finding]:
    def check() -> Finding:
        version = _version(package)
        if version is None:
            return Finding(name, MISSING, without)
        reason = _loads(module)
        return Finding(name, BROKEN if reason else OK, reason or f"{version}; {use}")
    return check


def _video() -> Finding:
    version = _version("av")
    if version is None:
        return Finding("av", MISSING, "`dsv prepare` and `dsv sample` cannot read or write videos")
    reason = _loads("av")
    if reason:
        return Finding("av", BROKEN, reason)
    import av

    try:
        av.codec.Codec("libx264", "w")
    except Exception:  # the class of the error differs between releases of PyAV
        return Finding("av", BROKEN, f"{version} without an h264 encoder: `dsv sample` cannot write mp4")
    return Finding("av", OK, f"{version} with h264")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _megatron, _psutil, _cuda, _triton, _transformer_engine, _apex,
    _optional("cudnn-frontend", "nvidia-cudnn-frontend", "cudnn", "block-sparse attention on Hopper",
              "no cuDNN block-sparse attention; extra `kernels`"),
    _optional("flash-attn-4", "flash-attn-4", "flash_attn.cute", "dense attention on Hopper",
              "dense attention runs on torch's SDPA; extra `kernels`"),
    _optional("diffusers", "diffusers", "diffusers", "AutoencoderKLWan and AutoencoderKL codecs",
              "only the haar codec; extra `vae`"),
    _optional("transformers", "transformers", "transformers", "UMT5 and T5 text encoders",
              "only the hash text encoder; extra `vae`"),
    _optional("wandb", "wandb", "wandb", "tracking with --wandb-project", "TensorBoard only; extra `wandb`"),
    _optional("tensorboard", "tensorboard", "tensorboard", "metrics with --tensorboard-dir", "no metrics on disk"),
    _video,
)
