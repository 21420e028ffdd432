"""The least time of a head assignment by integer programming (scipy's HiGHS): the oracle of the planner's search.

Symbols: G units, g_h head places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_dsv.context_parallel.cost_model import Terms


class Optimum(NamedTuple):
    """Nanoseconds: of the best assignment that was found, and what none undercuts; proven where they met."""

    incumbent: float
    bound: float
    proven: bool


def least_time(terms: Terms, g_h: int, *, gap: float = 2e-3, time_limit: float = 120.0) -> Optimum:
    """Minimum of slowest forward + slowest backward + slowest all-to-all over all assignments.

    Args:
        terms: of one tensor-parallel rank.
        g_h: head places.
        gap: relative distance of incumbent and bound that counts as met.
        time_limit: seconds.
    """
    from scipy import optimize

    units = len(terms.forward)
    scale = max(1, (sum(terms.forward) + sum(terms.backward)) // units)
    size = units * g_h + 3
    forward_time, backward_time, a2a_time = size - 3, size - 2, size - 1
    rows, low, high = [], [], []

    def constrain(entries: list[tuple[int, float]], at_least: float, at_most: float = np.inf) -> None:
        row = np.zeros(size)
        for index, value in entries:
            row[index] += value
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for unit in range(units):
        constrain([(unit * g_h + place, 1.0) for place in range(g_h)], 1.0, 1.0)
    seen = 1 - terms.hidden / 1000
    passes = ((forward_time, terms.select, terms.forward, terms.kv),
              (backward_time, (0,) * units, terms.backward, terms.kv_back))
    for place in range(g_h):
        here = [unit * g_h + place for unit in range(units)]
        for time, extra, attention, exchange in passes:
            # attention + max(0, exchange - hidden share of attention) is the larger of two sums.
            constrain([(time, 1.0), *((c, -(x + a) / scale) for c, x, a in zip(here, extra, attention))], 0.0)
            constrain([(time, 1.0), *((c, -(x + seen * a + e) / scale)
                                      for c, x, a, e in zip(here, extra, attention, exchange))], 0.0)
        if terms.peers:
            constrain([(a2a_time, 1.0), *((c, -terms.a2a * terms.peers / scale) for c in here)], 0.0)
            constrain([(a2a_time, 1.0), *((c, terms.a2a / scale) for c in here)], terms.a2a * units / scale)
    # Places are alike: unit u goes to one of the first u + 1.
    upper = np.full(size, np.inf)
    upper[:-3] = [float(place <= unit) for unit in range(units) for place in range(g_h)]
    result = optimize.milp(
        np.array([0.0] * (size - 3) + [1.0] * 3), integrality=np.array([1] * (size - 3) + [0] * 3),
        constraints=optimize.LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=optimize.Bounds(0, upper), options={"mip_rel_gap": gap, "time_limit": time_limit})
    incumbent = result.fun * scale if result.fun is not None else np.inf
    return Optimum(incumbent, result.mip_dual_bound * scale, result.status == 0)
