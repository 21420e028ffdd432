"""TokenLayout: video tokens in raster order <-> in 3-D cube order, so that a query group is a compact piece of video.

Only real tokens are permuted. A cube cut by the edge of the video keeps its few tokens and the next cube follows at
once, so a query group may straddle two cubes; only the tail of the sequence is padded. (Padding every cube would add
22% to the tokens of a 21 x 30 x 52 video in cubes of 4 x 4 x 4.)

Dims: T, H, W video tokens along time, height, width; ct, ch, cw the cube; n = T*H*W tokens; s slots = n padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def pad_multiple(q_block_size: int, kv_block_size: int, tensor_parallel_size: int, context_parallel_size: int) -> int:
    """Tokens that a padded sequence is a multiple of.

    Whole query groups and equal shards of a tensor-parallel group; under context parallelism every rank gets as many
    tokens, whole query groups and whole key blocks.
    """
    whole = math.lcm(q_block_size, tensor_parallel_size)
    return whole if context_parallel_size == 1 else math.lcm(whole, kv_block_size) * context_parallel_size


def default_cube(q_block_size: int) -> tuple[int, int, int]:
    """The most nearly cubic (ct, ch, cw) of ``q_block_size`` tokens: 32 -> 2,4,4; 64 -> 4,4,4; 128 -> 4,4,8.

    The factors of two are dealt out evenly; one left over goes to the width, two to the width and the height.

    Raises:
        ValueError: ``q_block_size`` is not a power of two.
    """
    if q_block_size < 1 or q_block_size & (q_block_size - 1):
        raise ValueError("--dsv-q-block-size must be a power of two where --dsv-cube-size is not given, "
                         f"got {q_block_size}")
    each, left = divmod(q_block_size.bit_length() - 1, 3)
    return 2**each, 2 ** (each + (left == 2)), 2 ** (each + (left >= 1))


@dataclass(frozen=True)
class TokenLayout:
    """The order of one video's tokens inside the transformer. Hashable; build one for each video shape and keep it.

    Cubes follow each other in raster order (time slowest), and so do the tokens within a cube.

    Attributes:
        grid: (T, H, W) tokens of the video, each at least 1.
        cube: (ct, ch, cw) tokens of a full cube, each at least 1.
        pad_multiple: the padded length is the next multiple of this many tokens.
    """

    grid: tuple[int, int, int]
    cube: tuple[int, int, int]
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("grid", "cube"):
            value = tuple(getattr(self, name))
            if len(value) != 3 or min(value) < 1:
                raise ValueError(f"TokenLayout.{name} must be three sizes (time, height, width) of at least 1, "
                                 f"got {value}")
            object.__setattr__(self, name, value)
        if self.pad_multiple < 1:
            raise ValueError(f"TokenLayout.pad_multiple must be at least 1, got {self.pad_multiple}")

    @property
    def num_tokens(self) -> int:
        """Real tokens, T*H*W."""
        return math.prod(self.grid)

    @property
    def padded_length(self) -> int:
        """Slots: ``num_tokens`` rounded up to a multiple of ``pad_multiple``."""
        return -(-self.num_tokens // self.pad_multiple) * self.pad_multiple

    def permutation(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [num_tokens]: the raster number of the token in each slot. Cached per device; do not write to it."""
        return self._on_device("permutation", self._permutation, device)

    def inverse(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [num_tokens]: the slot of each token of the raster order. Cached per device; do not write to it."""
        return self._on_device("inverse", self._inverse, device)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [padded_length, 3]: (t, h, w) of the token in each slot; zeros in the padding. Cached per device."""
        return self._on_device("positions", self._positions, device)

    def to_cube_order(self, x: Tensor, dim: int = 0) -> Tensor:
        """Raster order -> slots.

        Args:
            x: ``num_tokens`` long along ``dim``; any other dimensions.

        Returns:
            ``padded_length`` long along ``dim``; the padding slots hold zeros. Differentiable.

        Raises:
            ValueError: ``x`` has another length along ``dim``.
        """
        self._check(x, dim, self.num_tokens, "num_tokens")
        ordered = x.index_select(dim, self.permutation(x.device))
        tail = self.padded_length - self.num_tokens
        if tail == 0:
            return ordered
        after = x.dim() - 1 - dim % x.dim()
        return torch.nn.functional.pad(ordered, (0, 0) * after + (0, tail))

    def to_raster_order(self, x: Tensor, dim: int = 0) -> Tensor:
        """Slots -> raster order; the padding is dropped.

        Args:
            x: ``padded_length`` long along ``dim``; any other dimensions.

        Returns:
            ``num_tokens`` long along ``dim``. Differentiable; the padding gets zero gradient.

        Raises:
            ValueError: ``x`` has another length along ``dim``.
        """
        self._check(x, dim, self.padded_length, "padded_length")
        return x.index_select(dim, self.inverse(x.device))

    @cached_property
    @torch.inference_mode(False)  # cached under inference mode, it could not be saved for a later backward
    def _permutation(self) -> Tensor:
        (T, H, W), (ct, ch, cw) = self.grid, self.cube
        t, h, w = torch.arange(T)[:, None, None], torch.arange(H)[:, None], torch.arange(W)
        cubes_h, cubes_w = -(-H // ch), -(-W // cw)
        cube = ((t // ct) * cubes_h + h // ch) * cubes_w + w // cw
        inside = ((t % ct) * ch + h % ch) * cw + w % cw
        return torch.argsort((cube * (ct * ch * cw) + inside).reshape(-1))

    @cached_property
    @torch.inference_mode(False)
    def _inverse(self) -> Tensor:
        inverse = torch.empty_like(self._permutation)
        inverse[self._permutation] = torch.arange(self.num_tokens)
        return inverse

    @cached_property
    @torch.inference_mode(False)
    def _positions(self) -> Tensor:
        _, H, W = self.grid
        raster = self._permutation
        positions = torch.zeros(self.padded_length, 3, dtype=torch.int64)
        positions[: self.num_tokens] = torch.stack((raster // (H * W), raster // W % H, raster % W), dim=1)
        return positions

    @cached_property
    def _copies(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    @torch.inference_mode(False)
    def _on_device(self, name: str, tensor: Tensor, device: torch.device | str) -> Tensor:
        device = torch.device(device)
        if device.type == "cpu":
            return tensor
        if (name, device) not in self._copies:
            self._copies[name, device] = tensor.to(device)
        return self._copies[name, device]

    def _check(self, x: Tensor, dim: int, length: int, name: str) -> None:
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
            raise ValueError(f"x must be {name}={length} long along dim {dim} for the grid {self.grid}, "
                             f"got shape {tuple(x.shape)}")
