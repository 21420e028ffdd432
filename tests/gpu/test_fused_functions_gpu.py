"""The compiled pointwise functions against their formulas in fp64, forward and gradients, at odd shapes."""

import pytest
import torch

from megatron_dsv.transformer.adaln import gated_residual, modulated_norm
from megatron_dsv.transformer.norms import FullWidthRMSNorm
from megatron_dsv.transformer.rope3d import apply_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def _norm(x, weight):
    module = FullWidthRMSNorm(*x.shape[-2:], 1e-6, None)
    module.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    return module(x)


def _modulated_norm_exact(x, shift, scale):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift


def _rope_exact(x, cos, sin):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None, None]).flatten(-2)


def _norm_exact(x, weight):
    return x / (x.square().mean((-2, -1), keepdim=True) + 1e-6).sqrt() * weight


CASES = {
    "modulated_norm": (lambda x, shift, scale: modulated_norm(x, shift, scale, 1e-6), _modulated_norm_exact,
                       [(37, 2, 96), (2, 96), (2, 96)]),
    "gated_residual": (gated_residual, lambda r, x, bias, gate: r + gate * (x + bias),
                       [(37, 2, 96), (37, 2, 96), (96,), (2, 96)]),
    "apply_rope": (apply_rope, _rope_exact, [(37, 2, 3, 16), (37, 8), (37, 8)]),
    "full_width_norm": (_norm, _norm_exact, [(37, 2, 3, 16), (3, 16)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_compiled_function_equals_fp64(name, dtype):
    function, exact, shapes = CASES[name]
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    dout = torch.randn(shapes[0], generator=generator, dtype=torch.float64).to(dtype)

    def run(compute, where, precision):
        leaves = [x.to(where, precision).requires_grad_() for x in inputs]
        out = compute(*leaves)
        grad, = torch.autograd.grad(out, leaves[:1], dout.to(where, precision))
        assert out.dtype == grad.dtype == precision
        return out.double().cpu(), grad.double().cpu()

    for ours, theirs in zip(run(function, "cuda", dtype), run(exact, "cpu", torch.float64), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < (3e-3 if dtype == torch.bfloat16 else 3e-6)
