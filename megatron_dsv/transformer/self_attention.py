"""DSVSelfAttention: Megatron's self-attention with a predictor that finds the critical keys of each query group.

Dims: s tokens (of this rank's shard under sequence parallelism), S all tokens, b batch, H hidden, h local query heads,
G local key/value heads, d head dim, r predictor rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.plan import BlockPlan, attending
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.context_parallel.scheme import AttentionScheme, Pending
from megatron_dsv.kernels.block_scores.api import pool_queries
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.transformer.layer_statistics import LayerStatistics
from megatron_dsv.transformer.norms import FullWidthRMSNorm
from megatron_dsv.transformer.predictor import LowRankPredictor
from megatron_dsv.transformer.predictor_teacher import (
    PredictorInput,
    examine,
    learn,
    low_rank_keys,
    low_rank_queries,
)
from megatron_dsv.transformer.rope3d import RopeTables, apply_rope
from megatron_dsv.transformer.selection_cache import SelectionCache
from megatron_dsv.transformer.selector import Selector


class DSVSelfAttention(SelfAttention):
    """Self-attention over the predicted critical keys, or dense attention while the predictor learns.

    Takes the place of ``SelfAttention`` in any megatron.core layer spec (``get_dsv_layer_spec``). The training loop
    calls ``begin_step`` before each step; ``training/dsv_controller.py`` does, and updates predictors and statistics.

    Args:
        config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection, pp_layer_offset, name: as in
            SelfAttention.
        dsv: the sparse-attention configuration.
        full_width_qk_norm: RMS norm of queries and keys over all heads (Wan 2.1) instead of Megatron's per-head norm.
        seed: initialises the predictor.
        plans: the plan in force under context parallelism; None without.

    Raises:
        NotImplementedError: key/value heads that tensor parallelism would tear.
    """

    def __init__(self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int,
                 attn_mask_type: AttnMaskType = AttnMaskType.no_mask, cp_comm_type: str | None = None,
                 pg_collection: Any = None, pp_layer_offset: int | None = None, name: str | None = None, *,
                 dsv: DSVConfig, full_width_qk_norm: bool = False, seed: int = 1234,
                 plans: PlanStore | None = None) -> None:
        super().__init__(config=config, submodules=submodules, layer_number=layer_number,
                         attn_mask_type=attn_mask_type, cp_comm_type=cp_comm_type, pg_collection=pg_collection,
                         pp_layer_offset=pp_layer_offset, name=name)
        tp = self.pg_collection.tp
        if config.num_query_groups % tp.size():
            raise NotImplementedError(f"--num-query-groups must be a multiple of --tensor-model-parallel-size "
                                      f"{tp.size()}, got {config.num_query_groups}; a key/value head is never torn")
        self.dsv = dsv
        self.plans = plans
        self.softmax_scale = config.softmax_scale or config.kv_channels**-0.5
        heads, kv_heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        if full_width_qk_norm:
            self.q_layernorm = FullWidthRMSNorm(heads, config.kv_channels, config.layernorm_epsilon, tp)
            self.k_layernorm = FullWidthRMSNorm(kv_heads, config.kv_channels, config.layernorm_epsilon, tp)
        query_heads = range(tp.rank() * heads, (tp.rank() + 1) * heads)
        self.predictor: LowRankPredictor | None = None
        self.statistics: LayerStatistics | None = None
        if dsv.has_predictor:
            hidden_input = dsv.dsv_predictor_input == "hidden"
            self.predictor = LowRankPredictor(
                layer_number=layer_number, query_heads=query_heads,
                key_heads=range(tp.rank() * kv_heads, (tp.rank() + 1) * kv_heads),
                channels=config.hidden_size if hidden_input else config.kv_channels, rank=dsv.dsv_predictor_rank,
                input_kind=dsv.dsv_predictor_input, seed=seed, tp_group=tp)
            self.statistics = LayerStatistics(heads, tp)
        self.selector = Selector(dsv, layer_number=layer_number, query_heads=query_heads, num_kv_heads=kv_heads,
                                 head_dim=config.kv_channels, dtype=config.params_dtype,
                                 statistics=self.statistics)
        self.cache = SelectionCache()
        self.step = 0
        self.profiles = False

    def begin_step(self, step: int, *, profiles: bool) -> None:
        """Tells the layer which step of the run follows and whether its statistics are measured in it."""
        self.step = step
        self.profiles = profiles
        self.cache.clear()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None,  # type: ignore[override]
                key_value_states: Tensor | None = None, inference_context: Any = None, rotary_pos_emb: Any = None,
                rotary_pos_cos: Tensor | None = None, rotary_pos_sin: Tensor | None = None,
                rotary_pos_cos_sin: Tensor | None = None, attention_bias: Tensor | None = None,
                packed_seq_params: Any = None, sequence_len_offset: Any = None, *, inference_params: Any = None,
                rope: RopeTables | None = None, kv_length: Tensor | None = None,
                layout: TokenLayout | None = None) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, H] -> output [s, b, H] and its bias, not yet added.

        Under context parallelism s counts this rank's chunk of the sequence, and so do ``rope`` and ``hidden_states``.

        Args:
            rotary_pos_emb: Megatron's rotary embedding, for models that use it.
            rope: 3-D rotary tables, for video models.
            kv_length: int32 [b] on the CPU; tokens of the whole sequence at or after it are padding. None: all are
                real.
            layout: token order; only window attention reads it.

        Raises:
            NotImplementedError: masks, packed sequences or inference contexts, which full video attention has not.
        """
        for flag, given in (("attention_mask", attention_mask), ("key_value_states", key_value_states),
                            ("inference_context", inference_context), ("attention_bias", attention_bias),
                            ("packed_seq_params", packed_seq_params), ("inference_params", inference_params)):
            if given is not None:
                raise NotImplementedError(f"DSVSelfAttention serves full, unmasked self-attention: {flag} must be "
                                          "None; use kv_length to hide padding")
        if rotary_pos_emb is not None and self.plans is not None:
            raise NotImplementedError("DSVSelfAttention takes chunk c of the sequence on rank c of a context-parallel "
                                      "group, Megatron's rotary_pos_emb another part: pass rope= instead")
        shards = self.pg_collection.cp.size() * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
        num_tokens = hidden_states.shape[0] * shards
        if kv_length is None:
            kv_length = torch.full((hidden_states.shape[1],), num_tokens, dtype=torch.int32, device="cpu")
        watched = self.predictor is not None and self.training and torch.is_grad_enabled()
        pending = self.cache.pop() if self.training and torch.is_grad_enabled() else None
        sparse = self.selector.attends_sparsely(int(kv_length.max()))
        selects = sparse or self.dsv.window_fraction is not None
        plan = self._plan(num_tokens, selects)
        source = None
        if self.dsv.dsv_predictor_input == "hidden" and (watched or (sparse and pending is None)):
            source = self._hidden_source(hidden_states, rope)
            pending = self._begin(source, kv_length, plan) if sparse and pending is None else pending

        query, key, value = self.get_query_key_value_tensors(hidden_states, None)
        query, key = self._rotate(query, key, rope, rotary_pos_emb)

        if self.dsv.dsv_predictor_input == "qk" and (watched or (sparse and pending is None)):
            source = PredictorInput(query.detach(), key.detach(), None)
            pending = self._begin(source, kv_length, plan) if sparse and pending is None else pending
        if pending is None:
            pending = self._static_selection(query, key, kv_length, layout, plan)
        if self.training and not torch.is_grad_enabled() and selects:
            self.cache.store(pending)
        if watched and source is not None:
            self._watch(source, query, key, kv_length)
        return self.linear_proj(self._attend(query, key, value, pending))

    def _hidden_source(self, hidden_states: Tensor, rope: RopeTables | None) -> PredictorInput:
        with torch.no_grad():
            x = hidden_states.detach()
            if self.config.sequence_parallel:
                x = gather_from_sequence_parallel_region(x, group=self.pg_collection.tp)
        return PredictorInput(x, x, rope)

    def _plan(self, num_tokens: int, sparse: bool) -> BlockPlan | None:
        """This layer's plan for a sequence of so many tokens, padding included, in the plan now in force."""
        if self.plans is None:
            return None
        return attending(self.plans.block(num_tokens, self.layer_number - 1), sparse=sparse,
                         kv_block=self.dsv.dsv_kv_block_size)

    @torch.no_grad()
    def _begin(self, source: PredictorInput, kv_length: Tensor, plan: BlockPlan | None) -> Pending:
        assert self.predictor is not None
        scheme: AttentionScheme = self.core_attention.scheme
        q_lr = low_rank_queries(self.predictor, source)
        q_lr = pool_queries(q_lr, q_block_size=self.dsv.dsv_q_block_size, proxies=self.dsv.dsv_predictor_proxies,
                            query_length=scheme.own_length(kv_length, len(q_lr)))
        return scheme.begin(q_lr, low_rank_keys(self.predictor, source),
                            functools.partial(self.selector, kv_length=kv_length), plan)

    def _static_selection(self, query: Tensor, key: Tensor, kv_length: Tensor, layout: TokenLayout | None,
                          plan: BlockPlan | None) -> Pending:
        """Dense attention, or the window baseline."""
        if self.dsv.window_fraction is None:
            return Pending(selection=None, kv_length=kv_length, plan=plan)
        if layout is None:
            raise ValueError(f"--dsv-attention {self.dsv.dsv_attention} needs the token layout: pass layout= to "
                             "DSVSelfAttention, or use --dsv-attention predicted")
        # A window reads no scores: what it is selected from has shapes alone.
        proxies = -(-query.shape[0] // self.dsv.dsv_q_block_size) * self.dsv.dsv_predictor_proxies
        return self.core_attention.scheme.begin(
            query.new_zeros(proxies, *query.shape[1:3], 1), key.new_zeros(*key.shape[:3], 1),
            functools.partial(self.selector.window, layout), plan)

    def _rotate(self, query: Tensor, key: Tensor, rope: RopeTables | None,
                rotary_pos_emb: Any) -> tuple[Tensor, Tensor]:
        if rope is not None:
            return apply_rope(query, rope.cos, rope.sin), apply_rope(key, rope.cos, rope.sin)
        if rotary_pos_emb is None:
            return query, key
        q_emb, k_emb = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        rotate = functools.partial(apply_rotary_pos_emb, config=self.config, cp_group=self.pg_collection.cp)
        return rotate(query, q_emb), rotate(key, k_emb)

    def _watch(self, source: PredictorInput, query: Tensor, key: Tensor, kv_length: Tensor) -> None:
        """Trains the predictor on sampled rows and, when due, profiles sampled groups."""
        assert self.predictor is not None
        assert self.statistics is not None
        common = {"dsv": self.dsv, "kv_length": kv_length, "softmax_scale": self.softmax_scale, "step": self.step,
                  "scheme": self.core_attention.scheme}
        if self.profiles:
            self.statistics.add(examine(self.predictor, source, query, key, self.selector, **common))
        learn(self.predictor, source, query, key, **common)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pending: Pending) -> Tensor:
        if self.checkpoint_core_attention and self.training:
            return self._checkpointed_attention_forward(query, key, value, None, attn_mask_type=self.attn_mask_type,
                                                        core_attention_extra_kwargs={"pending": pending})
        return self.core_attention(query, key, value, None, attn_mask_type=self.attn_mask_type, pending=pending)
