"""Token layout of a latent video: one function, so that the model and the loop agree on lengths."""

from __future__ import annotations

from megatron_dsv.config import DSVConfig
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.embeddings import token_grid
from megatron_dsv.sparsity.token_layout import TokenLayout, default_cube, pad_multiple


def latent_layout(latent_shape: tuple[int, int, int], dit: VideoDiTConfig, dsv: DSVConfig,
                  tensor_parallel_size: int, context_parallel_size: int = 1) -> TokenLayout:
    """Cube order of the tokens of a latent video (frames, rows, columns).

    The tail is padded as ``pad_multiple`` says.
    """
    cube = dsv.cube or default_cube(dsv.dsv_q_block_size)
    whole = pad_multiple(dsv.dsv_q_block_size, dsv.dsv_kv_block_size, tensor_parallel_size, context_parallel_size)
    return TokenLayout(token_grid(latent_shape, dit.patch), cube, whole)
