"""The stack of DiT layers of one pipeline stage: Megatron's TransformerBlock with conditioning as tensor arguments.

Dims: s tokens (of this rank's shard under sequence parallelism), b batch, H hidden, L text tokens.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.transformer.rope3d import RopeTables


class DiTBlock(TransformerBlock):
    """Runs this stage's layers, with or without activation recomputation.

    Conditioning reaches the checkpointed layers as tensor arguments: what a re-entrant checkpoint only closes over
    gets no gradient.
    """

    def forward(self, hidden_states: Tensor | None, timestep_emb: Tensor, context: Tensor,  # type: ignore[override]
                kv_length: Tensor, rope: RopeTables | None, layout: TokenLayout | None = None) -> Tensor:
        """hidden_states [s, b, H] (None after the first stage), timestep_emb [b, 6, H], context [L, b, H],
        kv_length int32 [b] on the CPU -> [s, b, H]."""
        if not self.pre_process:
            hidden_states = self.input_tensor
        assert hidden_states is not None
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if self.config.recompute_granularity == "full" and self.training:
            return self._checkpointed(hidden_states, timestep_emb, context, kv_length, rope, layout)
        return self._run(range(len(self.layers)), hidden_states, timestep_emb, context, kv_length, rope, layout)

    def _run(self, numbers: range, hidden_states: Tensor, timestep_emb: Tensor, context: Tensor, kv_length: Tensor,
             rope: RopeTables | None, layout: TokenLayout | None) -> Tensor:
        for number in numbers:
            hidden_states = self.layers[number](hidden_states, timestep_emb, context, kv_length, rope, layout)
        return hidden_states

    def _checkpointed(self, hidden_states: Tensor, timestep_emb: Tensor, context: Tensor, kv_length: Tensor,
                      rope: RopeTables | None, layout: TokenLayout | None) -> Tensor:
        """Full recomputation: ``uniform`` in chunks of recompute_num_layers, ``block`` for that many first layers."""
        count, chunk = len(self.layers), self.config.recompute_num_layers
        if self.config.recompute_method == "uniform":
            chunks, kept = [range(i, min(i + chunk, count)) for i in range(0, count, chunk)], range(0)
        elif self.config.recompute_method == "block":
            chunks, kept = [range(i, i + 1) for i in range(min(chunk, count))], range(min(chunk, count), count)
        else:
            raise ValueError(f"--recompute-method must be uniform or block, got {self.config.recompute_method!r}")
        for numbers in chunks:
            def run(hidden: Tensor, emb: Tensor, text: Tensor, numbers: range = numbers) -> Tensor:
                return self._run(numbers, hidden, emb, text, kv_length, rope, layout)

            if torch.is_grad_enabled():
                hidden_states = tensor_parallel.checkpoint(
                    run, self.config.distribute_saved_activations, hidden_states, timestep_emb, context)
            else:
                hidden_states = run(hidden_states, timestep_emb, context)
        return self._run(kept, hidden_states, timestep_emb, context, kv_length, rope, layout)
