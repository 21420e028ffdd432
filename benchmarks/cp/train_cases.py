"""Launches of the training benchmark: how many ranks, which plans before which steps, and what is predicted of them.

Symbols: H heads, C ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cp.block import ALONE, PLANNED
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.cost_model import AttentionShape
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout
from megatron_dsv.context_parallel.microbenchmarks import HEAD_SPREAD
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.plan import BlockPlan, Topology, even_block
from megatron_dsv.context_parallel.planner import Problem, plan_blocks
from megatron_dsv.context_parallel.simulator import Refusal, Simulator
from megatron_dsv.context_parallel.sparsity_traces import spread_heads
from megatron_dsv.context_parallel.statistics import BlockStats, modelled_coverage

PATTERN = "clustered"
"""Coverage that planning assumes: selections of a random model are as unlike each other as they can be."""
_ATTENTION_BYTES = 30 * 2**30


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: of the launch.
        ranks: C; 1 trains on one GPU.
        tokens: of a sample.
        sparsity: mean over heads; None is dense.
        arms: (step before which it begins, name), from step 0.
        steps: of the launch.
        heads, head_dim: H and d of the model.
        calibration: file of constants that planning and predictions take.
    """

    name: str
    ranks: int
    tokens: int
    sparsity: float | None
    arms: tuple[tuple[int, str], ...]
    steps: int
    heads: int
    head_dim: int
    calibration: str

    def arm_at(self, step: int) -> str:
        """The arm in force in the step after ``step`` finished ones."""
        return next(name for first, name in reversed(self.arms) if first <= step)

    def timed_steps(self, arm: str) -> range:
        """Finished steps before each step of ``arm`` that counts: all but its first, and but the first two of a launch,
        which compile; unless it has no other."""
        first = next(start for start, name in self.arms if name == arm)
        last = min((start for start, _ in self.arms if start > first), default=self.steps)
        warming = 2 if first == 0 else 1
        return range(min(first + warming, last - 1), last)

    def to_json(self) -> str:
        """JSON that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """What ``to_json`` wrote."""
        data = json.loads(text)
        return cls(**data | {"arms": tuple(map(tuple, data["arms"]))})


def densities(sparsity: float, heads: int, layer: int) -> tuple[float, ...]:
    """[H] kept shares of a layer: the same set in every layer, dealt to other heads."""
    shares = spread_heads(1 - sparsity, heads, HEAD_SPREAD)
    turn = 5 * layer % heads
    return shares[turn:] + shares[:turn]


def stats_of(case: Case, layer: int, tokens: int, q_block: int = 64) -> BlockStats:
    """What planning knows of a layer."""
    if case.sparsity is None:
        return BlockStats((1.0,) * case.heads)
    shares = densities(case.sparsity, case.heads, layer)
    return BlockStats(shares, modelled_coverage(shares, 1, tokens=tokens, q_block=q_block, pattern=PATTERN,
                                                sizes=[case.ranks]))


def plan_of(arm: str, case: Case, topo: Topology, *, layers: int, tokens: int, block: int = 64
            ) -> tuple[BlockPlan, ...]:
    """The plan of every block: one of the pure splits, or what the planner makes of the calibration."""
    sparse, units = case.sparsity is not None, case.heads // topo.tp
    if arm != PLANNED:
        g_h, g_s = (int(part) for part in arm.strip("()").split(","))
        return tuple(even_block(layer, Split(g_h, g_s), tp=topo.tp, units=units, sparse=sparse, kv_block=block)
                     for layer in range(layers))
    model = Calibration.load(case.calibration).cost_model(_ATTENTION_BYTES)
    shape = AttentionShape(tokens, 1, units, 1, case.head_dim, block, block)
    found = plan_blocks(Problem(model, shape, topo), [stats_of(case, layer, tokens) for layer in range(layers)],
                        [sparse] * layers)
    return tuple(candidate.plan for candidate in found)


def predicted_ms(arm: str, case: Case, model: ModelShape) -> float:
    """Milliseconds of a step by the simulator; raises ValueError where it says that the case cannot run."""
    constants = Calibration.load(case.calibration)
    job = Job(model, case.tokens, 1, sparse=case.sparsity is not None, recompute="full", ema=False)
    allowed: tuple[Split, ...] = ()
    if arm not in (ALONE, PLANNED):
        g_h, g_s = (int(part) for part in arm.strip("()").split(","))
        allowed = (Split(g_h, g_s),)
    simulator = Simulator(constants.cluster.with_gpus(case.ranks), constants.kernels, job,
                          lambda tokens: [stats_of(case, layer, tokens) for layer in range(model.layers)], allowed,
                          constants.handling)
    result = simulator.simulate(JobLayout(1, 1, case.ranks, 1))
    if isinstance(result, Refusal):
        raise ValueError(f"{case.name}, {arm}: {result.reason}")
    return result.step_ms
