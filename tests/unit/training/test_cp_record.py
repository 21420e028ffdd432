"""The record of planning in a checkpoint: it comes back as it was, and nothing that is not one is taken for one."""

import argparse
import re

import pytest

from megatron_dsv.context_parallel.corrections import Corrections
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.plan import CPPlan, Topology, even_block
from megatron_dsv.context_parallel.planner import Hysteresis
from megatron_dsv.training.cp_record import PlanningRecord, carry, stored_text


def record() -> PlanningRecord:
    blocks = tuple(even_block(layer, Split(2, 2), tp=1, units=4, sparse=True) for layer in range(2))
    plan = CPPlan(3, 40, Topology(4), ((1, 64), (65, 128)), (blocks, blocks), "stats", "costs", (5, 6))
    return PlanningRecord(plan, 40, [[0, 1], [2, 0]], {1: {2: [0.5, 0.25, 1.0, 0.1]}},
                          Corrections().observe("sparse heads", 2.0, 1.0), "costs")


def text_of(one: PlanningRecord) -> str:
    args = argparse.Namespace()
    assert stored_text(args) is None
    one.keep(args)
    return stored_text(args)


def test_it_comes_back_as_it_was():
    again = PlanningRecord.read(text_of(record()))
    assert again == record()
    assert text_of(again) == text_of(record())
    fresh = Hysteresis(threshold=0.1, patience=4)
    assert again.states(fresh, 2) == (Hysteresis(0.1, 4, (0, 1)), Hysteresis(0.1, 4, (2, 0)))
    assert again.states(fresh, 3) == (fresh,) * 3, "other buckets begin anew"


def test_one_of_an_earlier_version_comes_back_too():
    old = text_of(record()).replace('"corrections"', '"changed": [[0, 40], [40, 0]], "corrections"', 1)
    assert PlanningRecord.read(old) == record()


def test_a_run_that_does_not_plan_hands_it_on():
    saved, args = argparse.Namespace(), argparse.Namespace()
    carry(None, args)
    carry(saved, args)
    assert stored_text(args) is None
    record().keep(saved)
    carry(saved, args)
    assert PlanningRecord.read(stored_text(args)) == record()


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda text: text[:10], "Unterminated string"),
    (lambda text: "[1]", "cannot be read"),
    (lambda text: text.replace('"schema": 1', '"schema": 9'), "it is not of schema 1"),
    (lambda text: text.replace('"waited"', '"waiting"'), "waiting"),
    (lambda text: text.replace('\\"g_h\\":', '\\"g_x\\":'), "plan has fields that schema 1 does not"),
    (lambda text: text.replace('\\"layer\\":1', '\\"layer\\":7'), "every bucket must hold blocks 0..1 in order"),
    (lambda text: text.replace("0.25", "25.0"), "its coverage lies outside [0, 1]"),
    (lambda text: text.replace("[2, 0]", "[2, 0.5]"), "its counts are no whole numbers"),
    (lambda text: text.replace("[2, 0]", "[2]"), "its counts are of 1 blocks, its plan of 2"),
    (lambda text: text.replace("[2.0, 1]", "[-2.0, 1]"), "factors of corrections must be above 0"),
])
def test_what_is_none_is_refused_in_one_line(damage, reason):
    text = damage(text_of(record()))
    assert text != text_of(record())
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        PlanningRecord.read(text)
    assert str(caught.value).startswith("the record of planning cannot be read")
    assert "\n" not in str(caught.value)
