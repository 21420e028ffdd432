import pytest
import torch

from megatron_dsv.transformer.rope3d import apply_rope, axis_dims, rope_tables, rotation_table, sincos_embedding


@pytest.mark.parametrize(("dim", "expected"), [
    (128, (44, 42, 42)), (64, (24, 20, 20)), (16, (8, 4, 4)), (96, (32, 32, 32))])
def test_axis_split_is_wans(dim, expected):
    # Wan 2.1: d - 4 (d // 6), 2 (d // 6), 2 (d // 6)
    assert axis_dims(dim) == (dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6)) == expected


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="even number of channels, got 7"):
        axis_dims(7)


def test_rotation_equals_complex_multiplication():
    positions = torch.tensor([(t, y, x) for t in range(3) for y in range(4) for x in range(5)])
    dim = 32
    x = torch.randn(60, 2, 3, dim, dtype=torch.float64).float()
    cos, sin = rotation_table(positions, dim)
    angles = []
    for axis, width in enumerate((dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6))):
        for pair in range(width // 2):
            angles.append(positions[:, axis].double() / 10000.0 ** (2 * pair / width))
    rotation = torch.polar(torch.ones(60, dim // 2, dtype=torch.float64), torch.stack(angles, -1))
    expected = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * rotation[:, None, None])
    torch.testing.assert_close(apply_rope(x, cos, sin).double(), expected.flatten(-2), rtol=0, atol=2e-6)


def test_scores_depend_on_relative_position_only():
    cos, sin = rotation_table(torch.tensor([(0, 0, 0), (1, 2, 3), (5, 5, 5), (6, 7, 8)]), 24)
    q, k = torch.randn(2, 1, 1, 1, 24).expand(2, 4, 1, 1, 24)
    q, k = apply_rope(q, cos, sin)[:, 0, 0], apply_rope(k, cos, sin)[:, 0, 0]
    torch.testing.assert_close(q[0] @ k[1], q[2] @ k[3], rtol=0, atol=1e-5)


def test_tables_of_heads_and_predictors_have_their_widths():
    tables = rope_tables(torch.zeros(7, 3, dtype=torch.int64), 64, 16)
    assert [tuple(table.shape) for table in tables] == [(7, 32)] * 2 + [(7, 8)] * 4


def test_sincos_embedding_tells_positions_apart():
    positions = torch.tensor([(t, y, x) for t in range(3) for y in range(4) for x in range(5)])
    embedding = sincos_embedding(positions, 48)
    distances = torch.cdist(embedding.double(), embedding.double()) + torch.eye(60)
    assert distances.min() > 1e-3


def test_rows_of_the_whole_sequence_are_looked_up_beside_a_chunks_own():
    whole = torch.tensor([(t, y, x) for t in range(2) for y in range(3) for x in range(4)])
    tables = rope_tables(whole[8:16], 12, 8, whole)
    assert torch.equal(tables.row_cos[8:16], tables.predictor_cos)
    assert torch.equal(tables.row_sin[8:16], tables.predictor_sin)
    assert torch.equal(tables.row_cos, rotation_table(whole, 8)[0])
    assert tables.cos.shape == (8, 6)
    alone = rope_tables(whole, 12, 8)
    assert alone.row_sin is alone.predictor_sin
