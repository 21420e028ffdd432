"""VideoDiT: a video diffusion transformer on Megatron's pipeline, tensor, sequence and context parallelism.

Dims: b batch, C latent channels, T, Y, X latent frames, rows, columns; S tokens in raster order, s padded tokens in
3-D cube order, s' of this rank's shard under context and sequence parallelism: context rank c holds chunk c of s, and
its tensor ranks hold pieces of that; p = C x patch volume; H hidden; L text tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.embeddings import TextProjection, TimestepEmbedding, patchify, unpatchify
from megatron_dsv.models.layouts import latent_layout
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.transformer.adaln import ModulationTable, modulated_norm
from megatron_dsv.transformer.dit_block import DiTBlock
from megatron_dsv.transformer.rope3d import RopeTables, rope_tables, sincos_embedding
from megatron_dsv.transformer.transformer_config import DiTTransformerConfig


class VideoDiT(MegatronModule):
    """Predicts the velocity of a noisy latent video from its timestep and a text embedding.

    Conditioning layers are replicated on every pipeline stage, so that stages exchange nothing but hidden states.

    Args:
        config: Megatron's transformer configuration, with the DSV one inside.
        dit: the model's own configuration.
        layer_spec: spec of a layer, see ``transformer.layer_specs.get_dit_layer_spec``.
        pre_process: this pipeline stage embeds the latents.
        post_process: this pipeline stage predicts.
        pg_collection: Megatron's process groups.
        vp_stage: virtual pipeline stage.
    """

    def __init__(self, config: DiTTransformerConfig, dit: VideoDiTConfig, layer_spec: ModuleSpec, *,
                 pre_process: bool = True, post_process: bool = True, pg_collection: Any,
                 vp_stage: int | None = None) -> None:
        super().__init__(config=config)
        self.dit = dit
        self.pre_process = pre_process
        self.post_process = post_process
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.vp_stage = vp_stage
        self.share_embeddings_and_output_weights = False
        self.sequence_parallel = config.sequence_parallel
        hidden, patch_width = config.hidden_size, dit.dit_latent_channels * math.prod(dit.patch)

        self.timestep_embedding = TimestepEmbedding(dit.dit_frequency_dim, hidden)
        self.text_projection = TextProjection(dit.dit_text_dim, hidden)
        self.patch_embedding = nn.Linear(patch_width, hidden) if pre_process else None
        self.decoder = DiTBlock(config, layer_spec, post_layer_norm=False, pre_process=pre_process,
                                post_process=post_process, pg_collection=pg_collection, vp_stage=vp_stage)
        self.head_modulation = ModulationTable(2, hidden, self.sequence_parallel) if post_process else None
        self.head = nn.Linear(hidden, patch_width) if post_process else None
        self._initialise()
        self._mark_parameters()
        self.layout = functools.lru_cache(maxsize=64)(self._build_layout)
        self._positions = functools.lru_cache(maxsize=8)(self._build_positions)

    def forward(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Velocity of ``latents``.

        Args:
            latents: noisy latents [b, C, T, Y, X]; later pipeline stages read only the shape.
            timesteps: fp32 [b] in [0, 1]. Pass all three by keyword: Megatron's mixed-precision wrapper would cast
                positional fp32 tensors to bf16, and a timestep must not be rounded.
            text: text embeddings [b, L, dim].

        Returns:
            fp32 [b, C, T, Y, X] on the last pipeline stage, whole on every rank, else hidden states [s', b, H]. A
            backward through it makes gradients of this rank's tokens, so each context-parallel rank takes the whole
            loss, and their gradients add up.
        """
        frames, rows, columns = latents.shape[2:]
        latent_shape = (frames, rows, columns)
        layout = self.layout(latent_shape)
        rope, absolute = self._positions(layout, latents.device)
        kv_length = torch.full((latents.shape[0],), layout.num_tokens, dtype=torch.int32, device="cpu")
        head_emb, timestep_emb = self.timestep_embedding(timesteps)
        context = self.text_projection(text)

        hidden = self._embed(latents, layout, absolute) if self.patch_embedding is not None else None
        hidden = self.decoder(hidden, timestep_emb, context, kv_length, rope, layout)
        if self.head is None or self.head_modulation is None:
            return hidden
        shift, scale = self.head_modulation(head_emb[:, None].expand(-1, 2, -1))
        patches = self.head(modulated_norm(hidden, shift, scale, self.config.layernorm_epsilon))
        for group in self._shard_groups()[::-1]:
            patches = gather_from_sequence_parallel_region(patches, tensor_parallel_output_grad=False, group=group)
        return unpatchify(layout.to_raster_order(patches).float(), latent_shape, self.dit.patch)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Megatron's pipeline hook: the hidden states received from the stage before."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's distributed-checkpoint hook: conditioning layers are one copy among all pipeline stages."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        stage = self.pg_collection.pp.rank()
        for key, tensor in state.items():
            if key.startswith((f"{prefix}timestep_embedding.", f"{prefix}text_projection.")):
                state[key] = dataclasses.replace(tensor, replica_id=(stage, *tensor.replica_id[1:]))
        return state

    def _embed(self, latents: Tensor, layout: TokenLayout, absolute: Tensor | None) -> Tensor:
        """Patches in cube order, this rank's shard of them, through the patch embedding."""
        assert self.patch_embedding is not None
        patches = layout.to_cube_order(patchify(latents, self.dit.patch))
        for group in self._shard_groups():
            patches = _chunk(patches, group)
            if absolute is not None and group is not self.cp_group:
                absolute = _chunk(absolute, group)
        hidden = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        return hidden if absolute is None else hidden + absolute[:, None].to(hidden.dtype)

    def _build_layout(self, latent_shape: tuple[int, int, int]) -> TokenLayout:
        return latent_layout(latent_shape, self.dit, self.config.dsv, self.tp_group.size(), self.cp_group.size())

    def _shard_groups(self) -> list[torch.distributed.ProcessGroup]:
        """Groups that tokens are spread over, the outer one first."""
        return [*([self.cp_group] if self.cp_group.size() > 1 else []),
                *([self.tp_group] if self.sequence_parallel else [])]

    def _build_positions(self, layout: TokenLayout, device: torch.device) -> tuple[RopeTables | None, Tensor | None]:
        """Rotary tables, or the absolute embedding, of this context-parallel rank's chunk."""
        whole = layout.positions(device)
        positions = _chunk(whole, self.cp_group)
        if self.dit.dit_position == "sincos":
            return None, sincos_embedding(positions, self.config.hidden_size)
        # Predictors that read queries and keys find them rotated.
        rotated = self.config.dsv.has_predictor and self.config.dsv.dsv_predictor_input == "hidden"
        return rope_tables(positions, self.config.kv_channels, self.config.dsv.dsv_predictor_rank if rotated else 0,
                           whole if self.cp_group.size() > 1 else None), None

    def _initialise(self) -> None:
        """Layers that Megatron does not initialise, drawn alike on every rank of every layout."""
        std = self.config.init_method_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if module is self.head:
                    nn.init.zeros_(module.weight)
                else:
                    values = torch.randn(module.weight.shape, generator=self._generator(name)) * std
                    with torch.no_grad():
                        module.weight.copy_(values)
                nn.init.zeros_(module.bias)
            elif isinstance(module, ModulationTable):
                layer = name.split(".")
                if layer[0] == "decoder":
                    layer[2] = str(self.decoder.layers[int(layer[2])].layer_number)
                module.reset_parameters(self._generator(".".join(layer)))

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.config.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def _mark_parameters(self) -> None:
        """Tells Megatron which gradients are partial and which parameters are copies."""
        stage, stages = self.pg_collection.pp.rank(), self.pg_collection.pp.size()
        for module in (self.timestep_embedding, self.patch_embedding, self.head):
            _mark(module, sequence_parallel=self.sequence_parallel)
        if stages == 1:
            return
        for copied in (self.timestep_embedding, self.text_projection):
            # Shared: the gradient norm counts it once. Shared embedding: a bucket of its own; otherwise the distributed
            # optimizer's shards differ between stages, and the reduction over the pipeline would mix reduced and
            # unreduced gradients.
            _mark(copied, pipeline_parallel=True, shared=stage > 0, shared_embedding=True)


def _chunk(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """This rank's part of x along its first axis."""
    size = x.shape[0] // group.size()
    return x[size * group.rank():size * (group.rank() + 1)]


def _mark(module: nn.Module | None, **marks: bool) -> None:
    """Sets what Megatron looks for on each parameter of ``module``."""
    for parameter in module.parameters() if module is not None else ():
        for name, value in marks.items():
            setattr(parameter, name, value)
