"""The norm of local specs against its formula."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dsv.transformer.layer_norm import LocalNorm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_local_norm(normalization):
    config = SimpleNamespace(normalization=normalization, layernorm_zero_centered_gamma=False, sequence_parallel=True)
    norm = LocalNorm(config, hidden_size=16, eps=1e-3)
    x = torch.randn(3, 2, 16)
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert all(parameter.sequence_parallel is True for parameter in norm.parameters())
    assert not list(LocalNorm(config, 16, elementwise_affine=False).parameters())


def test_local_norm_refuses():
    config = SimpleNamespace(normalization="L2Norm", layernorm_zero_centered_gamma=False, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"--normalization must be one of \['LayerNorm', 'RMSNorm'\], got 'L2Norm'"):
        LocalNorm(config, 16)
    config = SimpleNamespace(normalization="RMSNorm", layernorm_zero_centered_gamma=True, sequence_parallel=False)
    with pytest.raises(NotImplementedError, match="--apply-layernorm-1p"):
        LocalNorm(config, 16)
