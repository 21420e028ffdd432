import pytest
import torch

from megatron_dsv.models.embeddings import patchify, sinusoid, token_grid, unpatchify


@pytest.mark.parametrize("shape", [(1, 7, 9), (5, 13, 3), (2, 4, 6), (1, 1, 1)])
@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 1, 3)])
def test_patches_round_trip_for_any_shape(shape, patch):
    latents = torch.randn(2, 3, *shape)
    patches = patchify(latents, patch)
    t, y, x = token_grid(shape, patch)
    assert patches.shape == (t * y * x, 2, 3 * patch[0] * patch[1] * patch[2])
    assert torch.equal(unpatchify(patches, shape, patch), latents)


def test_a_patch_holds_neighbouring_cells_of_one_token():
    latents = torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(1, 1, 2, 4, 6)
    patches = patchify(latents, (1, 2, 2))
    # Token (frame 1, row 1, column 2) covers rows 2-3 and columns 4-5 of frame 1.
    token = (1 * 2 + 1) * 3 + 2
    assert patches[token, 0].tolist() == latents[0, 0, 1, 2:4, 4:6].flatten().tolist()


def test_timesteps_keep_fp32_precision():
    close = torch.tensor([0.7, 0.7 + 2**-20])
    embedding = sinusoid(close, 256)
    assert embedding.dtype == torch.float32
    assert not torch.equal(embedding[0], embedding[1])
    half = 128
    exact = torch.tensor([0.7], dtype=torch.float32).double() * 1000 * 10000.0 ** -(torch.arange(half).double() / half)
    torch.testing.assert_close(embedding[0].double(), torch.cat((exact.cos(), exact.sin())), rtol=0, atol=1e-6)
