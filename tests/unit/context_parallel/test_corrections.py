import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dsv.context_parallel.corrections import BOUND, Correction, Corrections, kind_of
from megatron_dsv.context_parallel.geometry import Split

HEADS, SEQUENCE, HYBRID = Split(4, 1), Split(1, 4), Split(2, 2, "s_inner")


def observed(*times, count=1):
    result = Corrections()
    for _ in range(count):
        for split, measured, predicted in times:
            result = result.observe(kind_of(split, True), measured, predicted)
    return result


def test_only_what_kinds_differ_by_changes_a_prediction():
    """Everything twice as slow as predicted is no reason to prefer anything, least of all what never ran."""
    alike = observed((HEADS, 20.0, 10.0), (SEQUENCE, 8.0, 4.0))
    assert [alike.thousandths(split, True) for split in (HEADS, SEQUENCE, HYBRID)] == [1000, 1000, 1000]
    # 1.8 and 0.8 around their geometric mean, 1.2.
    apart = observed((HEADS, 18.0, 10.0), (SEQUENCE, 8.0, 10.0))
    assert [apart.thousandths(split, True) for split in (HEADS, SEQUENCE, HYBRID)] == [1500, 667, 1000]
    assert [apart.thousandths(split, False) for split in (HEADS, SEQUENCE)] == [1000, 1000], "dense blocks are others"


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_no_measurement_moves_a_prediction_beyond_the_bound(first, second):
    both = observed((HEADS, first, 1.0), (SEQUENCE, second, 1.0))
    for split in (HEADS, SEQUENCE):
        assert 1000 / BOUND - 1 <= both.thousandths(split, True) <= 1000 * BOUND


def test_a_lasting_error_asks_for_a_calibration_and_a_passing_one_does_not():
    correction = Correction(patience=5)
    for _ in range(60):
        correction = correction.observe(1.2, 1.0)
    assert correction.factor == pytest.approx(1.2, rel=1e-2)
    assert not correction.stale
    for _ in range(4):
        correction = correction.observe(3.0, 1.0)
    assert not correction.stale
    back = correction
    for _ in range(30):
        back = back.observe(1.0, 1.0)
    assert back.beyond == 0
    for _ in range(9):
        correction = correction.observe(3.0, 1.0)
    assert correction.stale
    with pytest.raises(ValueError, match="times must be above 0"):
        correction.observe(0.0, 1.0)


def test_a_clock_that_drifts_is_followed_and_then_asks_for_a_calibration():
    seen = observed((HEADS, 10.0, 10.0))
    for _ in range(60):
        seen = seen.observe(kind_of(HEADS, True), 20.0, 10.0)
    assert dict(seen.by_kind)["sparse heads"].factor == pytest.approx(2.0, rel=0.01)
    assert seen.stale == ("sparse heads",)
    assert observed((HEADS, 11.0, 10.0), count=60).stale == ()


def test_they_survive_json_and_nothing_else_is_taken():
    seen = observed((HEADS, 18.0, 10.0), (SEQUENCE, 8.0, 10.0), count=3)
    assert Corrections.from_data(json.loads(json.dumps(seen.to_data()))) == seen
    for wrong in ([1], {"sparse heads": 2.0}, {"sparse heads": ["a", 0]}, {"sparse heads": [0.0, 0]}):
        with pytest.raises(ValueError, match="corrections"):
            Corrections.from_data(wrong)


def test_corrected_terms_are_the_same_terms_in_other_units():
    from test_planner import MODEL, shape, stats

    from megatron_dsv.context_parallel.cost_model import block_cost, sums
    from megatron_dsv.context_parallel.plan import Topology, exchanges

    dear = dataclasses.replace(MODEL, corrections=observed((HEADS, 18.0, 10.0), (SEQUENCE, 8.0, 10.0)))
    topo, of = Topology(4), stats(8, 0)
    for split, factor in ((HEADS, 1.5), (SEQUENCE, 0.667), (HYBRID, 1.0)):
        totals = []
        for model in (MODEL, dear):
            terms = model.terms(shape(8), topo, split, of, 0, sparse=True, exchange=exchanges(split, True)[0])
            terms = model.restaged(terms, topo, split, True, min(2, max(1, split.g_s - 1)))
            loads = [sums(terms, range(i, 8, split.g_h)) for i in range(split.g_h)]
            totals.append(block_cost([terms], [loads]))
        assert totals[1].total == pytest.approx(factor * totals[0].total, rel=1e-5)
        assert totals[1].memory == totals[0].memory
