"""DSV's attention in a TransformerBlock of one's own, trained for six steps: python examples/plugin.py"""
import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.metrics import Recorder
from megatron_dsv.platform import cpu

cpu.enable()  # Megatron on a host without CUDA, called before its first import; it does nothing on a GPU
with cpu.optional_packages():  # no warnings that Transformer Engine and Apex are absent
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dsv.training.dsv_controller import DSVController, DSVGroups
    from megatron_dsv.transformer.layer_specs import get_dsv_layer_spec

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
model_parallel_cuda_manual_seed(1234)
groups = ProcessGroupCollection.use_mpu_process_groups()

config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0,
                           hidden_dropout=0.0, gradient_accumulation_fusion=False)
# A toy attends to all keys alike, and would not gain: half of them is forced, and the gate stands wide open.
dsv = DSVConfig(dsv_sparse_stage="auto", dsv_predictor_input="qk", dsv_q_block_size=16, dsv_kv_block_size=16,
                dsv_predictor_rank=8, dsv_profile_interval=2, dsv_keep_ratio=0.5, dsv_gate_recall=0.4,
                dsv_rollback_recall=0.3, dsv_dense_above=1.0)
block = TransformerBlock(config, get_dsv_layer_spec(dsv), pg_collection=groups).to(device)
dsv_groups = DSVGroups(data=groups.dp_cp, tensor=groups.tp, pipeline=groups.pp, model=groups.mp)
controller = DSVController([block], dsv, dsv_groups, config.num_layers, Recorder())
optimizer = torch.optim.AdamW([p for p in block.parameters() if p.requires_grad], lr=1e-3)
x = torch.randn(128, 1, 64, device=device)  # [tokens, batch, hidden]
controller.begin_run()
for step in range(6):
    controller.begin_micro_batch(step, num_tokens=128)
    loss = (block(x, attention_mask=None) - x.flip(0)).square().mean()
    loss.backward()
    controller.end_step()  # trains the predictors, and lets layers go sparse
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}", *controller.layer_reports, sep="\n  ")
torch.distributed.destroy_process_group()
