"""Tile sizes and launch options of the kernels, by pass, block sizes and head dim. Measured once, kept as data.

A pass walks a list for one tile of its own axis: forward and dq own BLOCK_M query rows and walk keys in steps
of BLOCK_N; dkv owns BLOCK_N keys and walks query rows in steps of BLOCK_M.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_dsv.kernels.launching import Tile, padded_dim

# (pass, widest padded head dim, own-axis tile) -> Tile, for 16-bit inputs; the own-axis tile is the largest that fits.
_TILES = {
    ("forward", 64, 128): Tile(64, 128, 4, 2),
    ("forward", 64, 64): Tile(64, 64, 4, 2),
    ("forward", 128, 128): Tile(128, 64, 4, 2),
    ("forward", 128, 64): Tile(64, 64, 4, 2),
    ("forward", 256, 128): Tile(128, 64, 8, 2),
    ("forward", 256, 64): Tile(64, 32, 4, 2),
    ("dq", 64, 128): Tile(64, 64, 4, 3),
    ("dq", 64, 64): Tile(64, 64, 4, 2),
    ("dq", 128, 128): Tile(128, 64, 8, 3),
    ("dq", 128, 64): Tile(64, 64, 4, 2),
    ("dq", 256, 128): Tile(128, 32, 8, 2),
    ("dq", 256, 64): Tile(64, 32, 4, 2),
    ("dkv", 64, 128): Tile(64, 64, 4, 3, tail=16),
    ("dkv", 64, 64): Tile(64, 64, 4, 3, tail=16),
    ("dkv", 128, 128): Tile(64, 128, 8, 3, tail=16),
    ("dkv", 128, 64): Tile(64, 64, 4, 2, tail=16),
    ("dkv", 256, 128): Tile(64, 64, 8, 2, tail=16),
    ("dkv", 256, 64): Tile(64, 64, 8, 2, tail=16),
}

# The same for the kernels written for Hopper, where they are the faster ones; num_stages is the depth of their rings.
HOPPER_BLOCK = 64
_HOPPER_TILES = {
    ("forward", 64, 128): Tile(64, 64, 4, 3, max_registers=128),
    ("forward", 64, 64): Tile(64, 64, 4, 3, max_registers=128),
    ("forward", 128, 128): Tile(128, 64, 8, 2, max_registers=128),
    ("forward", 128, 64): Tile(64, 64, 4, 2, max_registers=168),
    ("dq", 128, 128): Tile(64, 64, 4, 2),
    ("dq", 128, 64): Tile(64, 64, 4, 2),
    ("dq", 256, 64): Tile(64, 32, 4, 2),
    ("dkv", 64, 128): Tile(64, 64, 4, 3),
    ("dkv", 64, 64): Tile(64, 64, 4, 3),
    ("dkv", 128, 128): Tile(64, 64, 4, 2),
    ("dkv", 128, 64): Tile(64, 64, 4, 2),
    ("dkv", 256, 128): Tile(64, 64, 8, 2),
    ("dkv", 256, 64): Tile(64, 64, 8, 2),
}

# Short blocks are gathered row by row: more warps share the registers that the addresses take, and wide rows come few.
_GATHER_WARPS, _WIDE_GATHER_STEP = 8, 32

# fp32 multiplies without tensor cores: small tiles keep it within registers and shared memory.
_FP32_TILES = {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)}


def pick_hopper_tile(pass_name: str, *, q_block_size: int, kv_block_size: int, head_dim: int) -> Tile | None:
    """The tile of the Hopper kernel of one pass, or None where the kernel for any device is faster."""
    return _HOPPER_TILES.get(_key(pass_name, q_block_size, kv_block_size, head_dim))


def pick_tile(pass_name: str, *, q_block_size: int, kv_block_size: int, head_dim: int, itemsize: int) -> Tile:
    """The tile of one pass (``forward``, ``dq`` or ``dkv``).

    The own axis never spans two rows of the selection, so its tile shrinks to the block; the walked axis gathers
    several short blocks into one step.
    """
    key = _key(pass_name, q_block_size, kv_block_size, head_dim)
    width = key[1]
    own_block, walked_block = (q_block_size, kv_block_size)[::-1 if pass_name == "dkv" else 1]
    tile = _FP32_TILES[width] if itemsize == 4 else _TILES[key]
    block_m, block_n, warps = tile.block_m, tile.block_n, tile.num_warps
    own = padded_dim(own_block)
    if pass_name == "dkv":
        block_n = min(block_n, own)
    else:
        block_m = min(block_m, own)
        if block_n > 64 and walked_block % block_n:
            block_n = 64
    step = block_m if pass_name == "dkv" else block_n
    if walked_block % step and itemsize == 2:
        if max(block_m, block_n) == 128 or width == 256:
            warps = _GATHER_WARPS
        if width == 256:
            block_m, block_n = (_WIDE_GATHER_STEP, block_n) if pass_name == "dkv" else (block_m, _WIDE_GATHER_STEP)
    return replace(tile, block_m=block_m, block_n=block_n, num_warps=warps)


def _key(pass_name: str, q_block_size: int, kv_block_size: int, head_dim: int) -> tuple[str, int, int]:
    own_block = kv_block_size if pass_name == "dkv" else q_block_size
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return pass_name, width, 128 if own_block % 128 == 0 else 64
