"""How the attention benchmark deals out its suite, and how its contenders take turns."""

import pytest
from attention import cases, timing


class _Clock:
    """A device whose every stage takes the time that the run says."""

    def __init__(self):
        self.now, self.waits = 0.0, 0

    def mark(self):
        return self.now

    def wait(self):
        self.waits += 1

    def milliseconds(self, start, end):
        return (end - start) * 1e3


class _FakeRun:
    stages = ("first", "second")

    def __init__(self, clock, name, seconds, log):
        self.clock, self.name, self.seconds, self.log = clock, name, seconds, log

    def iterate(self, mark):
        self.log.append(self.name)
        # What follows a wait is slow, as a device that idled is.
        slow, self.clock.waits = (0.005 if self.clock.waits else 0.0), 0
        mark()
        self.clock.now += self.seconds / 4 + slow
        mark()
        self.clock.now += self.seconds * 3 / 4
        mark()


def test_contenders_take_turns_and_get_their_seconds():
    clock, log = _Clock(), []
    runs = {name: _FakeRun(clock, name, seconds, log) for name, seconds in (("a", 0.01), ("b", 0.04))}
    times = timing.interleaved(runs, clock, seconds=1.0)
    assert [times[name].median() for name in runs] == [pytest.approx(10), pytest.approx(40)]
    assert [times["b"].median(stage) for stage in ("first", "second")] == [pytest.approx(10), pytest.approx(30)]
    assert min(times[name].seconds for name in runs) >= 1.0
    assert log.count("a") >= 100
    turns = [name for name, before in zip(log, ["", *log]) if name != before]
    assert turns[:6] == ["a", "b"] * 3


def test_an_iteration_longer_than_a_slice_is_timed_alone():
    clock, log = _Clock(), []
    times = timing.interleaved({"long": _FakeRun(clock, "long", 3.0, log)}, clock, seconds=2.0)["long"]
    assert len(log) == 2
    assert times.median() == pytest.approx(3005)


def test_parts_cover_the_suite_once():
    groups = cases.suite("hopper")
    parts = [cases.choose(groups, (index, 3), None) for index in (1, 2, 3)]
    assert sorted(map(str, (group for part in parts for group in part))) == sorted(map(str, groups))
    loads = [sum(group.cost for group in part) for part in parts]
    assert max(loads) <= 1.5 * min(loads)
    with pytest.raises(ValueError, match="--part must be i/n"):
        cases.choose(groups, (4, 3), None)


def test_one_case_alone():
    groups = cases.choose(cases.suite("hopper"), (1, 1), "64k-deterministic")
    assert {point.case for group in groups for point in group.points} == {"64k-deterministic"}
    assert all(not group.dispatch for group in groups)
    with pytest.raises(ValueError, match=r"--only must be one of .*got 'none'"):
        cases.choose(groups, (1, 1), "none")


def test_no_two_points_of_the_suite_share_a_key():
    keys = [(p.case, p.granularity, p.backend, p.lists, p.keep_ratio)
            for group in cases.suite("hopper") for p in group.points]
    assert len(keys) == len(set(keys))
