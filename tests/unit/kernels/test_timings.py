"""The cost table's lookups: exact at measured points, monotone between them, proportional to the work."""

import pytest

from megatron_dsv.kernels.timings import DENSE, SPARSE, dense_ms, sparse_ms

H200 = "NVIDIA H200"


def test_measured_points_come_back():
    for row in DENSE[H200]:
        got = dense_ms(H200, tokens=row.tokens, heads=row.heads, head_dim=row.head_dim)
        assert got == pytest.approx((row.forward_ms, row.backward_ms))
    for row in SPARSE[H200]:
        got = sparse_ms(H200, tokens=row.tokens, heads=row.heads, head_dim=row.head_dim, density=row.density,
                        q_block_size=row.q_block_size, kv_block_size=row.kv_block_size)
        assert got == pytest.approx((row.forward_ms, row.backward_ms))


def test_dense_cost_grows_with_tokens_and_is_proportional_to_heads():
    costs = [dense_ms(H200, tokens=n, heads=24, head_dim=128) for n in (2048, 16384, 20000, 32760, 65536, 300000)]
    assert costs == sorted(costs)
    assert dense_ms(H200, tokens=32760, heads=12, head_dim=128)[0] * 2 == pytest.approx(costs[3][0])


def test_sparse_cost_is_proportional_to_density_and_takes_the_nearest_granularity():
    def cost(density, q_block=64, kv_block=64):
        return sparse_ms(H200, tokens=32768, heads=24, head_dim=128, density=density, q_block_size=q_block,
                         kv_block_size=kv_block)

    assert cost(0.2)[1] == pytest.approx(2 * cost(0.1)[1])
    assert cost(0.1, 256, 256) == cost(0.1, 128, 128)
    assert cost(0.1, 128, 1)[1] > cost(0.1, 128, 64)[1]
    dense = dense_ms(H200, tokens=32768, heads=24, head_dim=128)
    assert sum(cost(0.1)) < sum(dense) < sum(cost(1.0))


def test_unknown_device_and_density_are_refused():
    with pytest.raises(ValueError, match="device must be one that was measured, NVIDIA H200, got 'abacus'"):
        dense_ms("abacus", tokens=1024, heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"density must lie in \[0, 1\], got 1.5"):
        sparse_ms(H200, tokens=1024, heads=1, head_dim=64, density=1.5, q_block_size=64, kv_block_size=64)
