"""A two-layer regression transformer that goes through `pretrain()`: the smallest thing that trains in every layout.

Dims: s tokens, b samples of a micro-batch, f features of a token, d hidden size. Inputs and targets are [b, s, f].
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch

FEATURES = 8


class RegressionDataset(torch.utils.data.Dataset):
    """Sample i is a pure function of i: x [s, f] and a fixed nonlinear function of its neighbours as the target."""

    def __init__(self, length: int, sequence: int, offset: int = 0) -> None:
        self.length, self.sequence, self.offset = length, sequence, offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.offset + int(index))
        x = torch.randn(self.sequence, FEATURES, generator=generator)
        return {"x": x, "y": torch.tanh(x.roll(1, 0) * 2 + x)}


def build_model(pre_process: bool = True, post_process: bool = True, config: Any = None, pg_collection: Any = None,
                vp_stage: int | None = None) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    from megatron_dsv.transformer.layer_norm import LocalNorm

    class TinyModel(MegatronModule):
        def __init__(self) -> None:
            config = core_transformer_config_from_args(get_args(), TransformerConfig)
            super().__init__(config)
            self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
            self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
            self.share_embeddings_and_output_weights = False
            if pre_process:
                self.project_in = torch.nn.Linear(FEATURES, config.hidden_size)
            layers = [_layer_spec(LocalNorm)] * get_num_layers_to_build(config, vp_stage, self.pg_collection.pp.rank())
            self.decoder = TransformerBlock(
                config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalNorm),
                pre_process=pre_process, post_process=post_process, pg_collection=self.pg_collection,
            )
            if post_process:
                self.project_out = torch.nn.Linear(config.hidden_size, FEATURES)

        def set_input_tensor(self, input_tensor: list[torch.Tensor]) -> None:
            self.decoder.set_input_tensor(input_tensor[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = None
            if self.pre_process:
                hidden = self.project_in(x.transpose(0, 1).to(self.project_in.weight.dtype)).contiguous()
                if self.config.sequence_parallel:
                    hidden = scatter_to_sequence_parallel_region(hidden)
            hidden = self.decoder(hidden_states=hidden, attention_mask=None)
            if not self.post_process:
                return hidden
            if self.config.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            return self.project_out(hidden).transpose(0, 1)

    return TinyModel()


def _layer_spec(norm: Any) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.no_mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    return model(batch["x"]), partial(_loss, batch["y"])


def _loss(target: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = (output.float() - target).pow(2).mean(-1).sum()
    count = torch.tensor(target.shape[0] * target.shape[1], dtype=torch.int)
    return total, count, {"mse": torch.stack([total.detach(), count.float()])}


def datasets(num_samples: list[int]) -> tuple[RegressionDataset, ...]:
    from megatron.training import get_args

    length = get_args().seq_length
    return tuple(RegressionDataset(n or 1, length, offset=i * 100_000) for i, n in enumerate(num_samples))


datasets.is_distributed = True  # type: ignore[attr-defined]


def parse(argv: list[str]) -> argparse.Namespace:
    """Megatron's arguments, as a program that has no tokenizer gets them: building even the null one takes 4 s."""
    from megatron_dsv.platform import compat, cpu

    cpu.enable()
    compat.apply()
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    def extra_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.set_defaults(**(compat.defaults() | cpu.defaults()))
        parser.add_argument("--ema-decay", type=float, default=None)
        return parser

    sys.argv = ["tiny_model", *argv]
    args = parse_args(extra_args)
    validate_args(args)
    args.padded_vocab_size = 1
    set_global_variables(args, build_tokenizer=False)
    return args


def first_stage(ranks: list[int]) -> list[int]:
    """Where Megatron may look for an embedding; an empty list it does not take."""
    return ranks[:1]


def main(argv: list[str]) -> None:
    """Train the tiny model with Megatron's flags."""
    args = parse(argv)
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.training import pretrain

    from megatron_dsv.training import ema

    if args.ema_decay is not None:
        ema.install(args.ema_decay)
    pretrain(
        pretrain_cfg_container_from_args(args), datasets, ModelType.encoder_or_decoder, forward_step,
        model_provider=build_model, get_embedding_ranks=first_stage, get_position_embedding_ranks=first_stage,
    )


def load_ema(argv: list[str], checkpoint: str) -> dict[str, torch.Tensor]:
    """This rank's weights of a freshly built model after `load_ema_state`."""
    parse(argv)
    from megatron.core.enums import ModelType
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron_dsv.training.ema import load_ema_state

    training.initialize_megatron(get_embedding_ranks=first_stage, get_position_embedding_ranks=first_stage)
    model = training.get_model(build_model, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    load_ema_state(checkpoint, model)
    return {name: parameter.detach() for name, parameter in unwrap_model(model)[0].named_parameters()}


BASE = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
--weight-decay 0.1 --clip-grad 1.0 --eval-interval 3 --eval-iters 1 --log-interval 1 --seed 7
--tokenizer-type NullTokenizer --vocab-size 1 --position-embedding-type none --dataloader-type single
--num-workers 0 --attention-dropout 0 --hidden-dropout 0 --attention-backend unfused
--no-create-attention-mask-in-dataloader --disable-bias-linear --ckpt-format torch_dist
--dist-ckpt-optim-fully-reshardable
""".split()
