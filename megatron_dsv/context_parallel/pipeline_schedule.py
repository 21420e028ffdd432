"""The end of a pipelined step by a recurrence over stages and micro-batches (one forward, one backward, in turns)."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_ns(forward: Sequence[int], backward: Sequence[int], micro_batches: int, send: int) -> int:
    """Nanoseconds until the last stage's last backward has reached the first stage.

    Args:
        forward, backward: [stages] nanoseconds of one micro-batch.
        micro_batches: passes of a step.
        send: nanoseconds between stages.
    """
    stages = len(forward)
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        order = [(True, m) for m in range(warm)]
        for m in range(micro_batches - warm):
            order += [(True, warm + m), (False, m)]
        orders.append(order + [(False, m) for m in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[bool, int, int], int] = {}
    clock, position = [0] * stages, [0] * stages
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                is_forward, m = orders[stage][position[stage]]
                neighbour = stage - 1 if is_forward else stage + 1
                ready = 0
                if 0 <= neighbour < stages:
                    if (is_forward, neighbour, m) not in done:
                        break
                    ready = done[is_forward, neighbour, m] + send
                clock[stage] = max(clock[stage], ready) + (forward if is_forward else backward)[stage]
                done[is_forward, stage, m] = clock[stage]
                position[stage] += 1
                remaining -= 1
        assert remaining < before, "one stage can always go on"
    return max(clock)
