"""Tile sizes and launch options of the token kernels, by pass and head dim. Measured once, kept as data."""

from __future__ import annotations

from dataclasses import replace

from megatron_dsv.kernels.launching import Tile, padded_dim

# (pass, widest padded head dim) -> Tile, for 16-bit inputs
_TILES = {
    ("forward", 128): Tile(128, 64, 8, 2, max_registers=128),
    ("forward", 256): Tile(128, 32, 8, 2),
    ("dq", 128): Tile(128, 64, 8, 3),
    ("dq", 256): Tile(64, 64, 8, 2),
    ("dkv", 128): Tile(128, 64, 8, 3),
    ("dkv", 256): Tile(64, 32, 8, 2),
}

# fp32 multiplies without tensor cores: small tiles keep it within registers and shared memory.
_FP32_TILES = {128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}


def pick_tile(pass_name: str, *, q_block_size: int, head_dim: int, itemsize: int) -> Tile:
    """The tile of one pass (``forward``, ``dq`` or ``dkv``): BLOCK_M queries of one group, BLOCK_N keys a step."""
    width = 128 if head_dim <= 128 else 256
    tile = _FP32_TILES[width] if itemsize == 4 else _TILES[pass_name, width]
    block_m = min(tile.block_m, padded_dim(q_block_size))
    # Where a group takes several tiles, their queries are staged in shared memory as well.
    stages = min(tile.num_stages, 2) if pass_name == "dkv" and q_block_size > block_m else tile.num_stages
    return replace(tile, block_m=block_m, num_stages=stages, num_warps=tile.num_warps if block_m >= 64 else 4)


def fuses_dq(tile: Tile, *, q_block_size: int, head_dim: int) -> bool:
    """Whether the pass over keys computes dq, too: its sum must fit the registers beside dk and dv."""
    return tile.block_m >= q_block_size and head_dim <= 128
