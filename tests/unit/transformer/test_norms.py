import torch

from megatron_dsv.testing.model_parallel import initialize
from megatron_dsv.testing.ranks import run_ranks

HEADS, HEAD_DIM = 4, 6


def _inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    upstream = torch.randn(5, 2, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    return x, weight, upstream


def _local(tp):
    from megatron_dsv.transformer.norms import FullWidthRMSNorm

    groups = initialize(tensor_parallel=tp)
    x, weight, upstream = _inputs()
    heads = slice(groups.tp.rank() * HEADS // tp, (groups.tp.rank() + 1) * HEADS // tp)
    norm = FullWidthRMSNorm(HEADS // tp, HEAD_DIM, 1e-6, groups.tp)
    with torch.no_grad():
        norm.weight.copy_(weight[heads])
    x = x[:, :, heads].float().requires_grad_()
    out = norm(x)
    out.backward(upstream[:, :, heads].float())
    return out.detach(), x.grad, norm.weight.grad


def test_full_width_norm_is_the_same_on_one_and_two_ranks_and_right():
    x, weight, upstream = _inputs()
    x.requires_grad_()
    weight.requires_grad_()
    expected = x * torch.rsqrt(x.square().mean(dim=(-2, -1), keepdim=True) + 1e-6) * weight
    expected.backward(upstream)
    for tp in (1, 2):
        ranks = run_ranks(_local, tp, tp)
        out, x_grad, weight_grad = (torch.cat(parts, dim=-2) for parts in zip(*ranks, strict=True))
        torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(x_grad.double(), x.grad, rtol=0, atol=2e-6)
        torch.testing.assert_close(weight_grad.double(), weight.grad, rtol=0, atol=1e-5)
