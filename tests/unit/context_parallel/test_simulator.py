import time
from argparse import Namespace
from dataclasses import replace
from functools import cache

import pytest
import yaml

from megatron_dsv import presets
from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout, layouts, limit
from megatron_dsv.context_parallel.job_memory import memory_parts, predictor_parameters, usable_bytes
from megatron_dsv.context_parallel.kernel_rates import ARTIFACT, FittedKernels, MeasuredKernels
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.pipeline_schedule import pipeline_ns
from megatron_dsv.context_parallel.simulator import Refusal, Simulation, Simulator, dense_twin
from megatron_dsv.context_parallel.sparsity_traces import Trace, spread_heads
from megatron_dsv.context_parallel.statistics import BlockStats, modelled_coverage
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.layouts import latent_layout
from megatron_dsv.training.flops import forward_flops
from megatron_dsv.transformer.predictor import LowRankPredictor

KERNELS = FittedKernels(65536, 24, 128, (80.0, 220.0), (0.5, 100.0), (1.0, 300.0), 2.0)
H200, H800 = cluster.load("h200"), cluster.load("h800")


@cache
def model(name):
    return ModelShape.from_settings(name, yaml.safe_load(presets.path(f"model/{name}").read_text()))


def traced(shape, trace, q_block=64):
    return lambda tokens: trace.stats(shape.layers, shape.heads, shape.groups, tokens=tokens, q_block=q_block,
                                      sizes=[2**k for k in range(11)])


def simulator(name, tokens, batch, gpus=H200, kernels=KERNELS, trace=None, **job):
    shape = model(name)
    made = Job(shape, tokens, batch, **job)
    return Simulator(gpus, kernels, made, traced(shape, trace or Trace(), made.q_block))


class TestModelShape:
    @pytest.mark.parametrize(("name", "parameters", "per_layer"), [
        ("dsv-0.8b", 759_777_472, 26_570_880), ("wan2.1-1.3b", 1_418_996_800, 46_440_704),
        ("dsv-2.7b", 2_728_749_120, 83_937_280), ("wan2.1-14b", 14_288_491_584, 351_394_304),
        ("dsv-30b", 29_930_367_040, 704_780_288),
    ])
    def test_parameters_are_those_of_the_models(self, name, parameters, per_layer):
        assert model(name).parameters == pytest.approx(parameters, rel=2e-3)
        assert model(name).layer_parameters == pytest.approx(per_layer, rel=2e-3)

    def test_operations_are_those_that_training_counts(self):
        for name in ("dsv-30b", "wan2.1-1.3b"):
            settings = yaml.safe_load(presets.path(f"model/{name}").read_text())
            args = Namespace(kv_channels=None, **{key.replace("-", "_"): value for key, value in settings.items()})
            shape = model(name)
            ours = shape.layers * (shape.linear_flops(32760) + shape.attention_flops(32760))
            assert ours == pytest.approx(forward_flops(args, 32760), rel=1e-12)

    def test_a_missing_flag_is_named(self):
        with pytest.raises(ValueError, match="model mine: ffn-hidden-size must be a whole number of at least 1, got N"):
            ModelShape.from_settings("mine", {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 2})

    def test_defaults_are_those_of_the_model(self):
        bare = {"hidden-size": 64, "num-attention-heads": 4, "num-layers": 2, "ffn-hidden-size": 128}
        config = VideoDiTConfig()
        shape = ModelShape.from_settings("mine", bare)
        assert (shape.text_length, shape.text_dim) == (config.dit_text_length, config.dit_text_dim)
        assert shape.matrices == (3 if config.dit_mlp == "geglu" else 2)


class TestPipeline:
    def test_one_stage_has_no_bubble(self):
        assert pipeline_ns([3], [7], 5, 100) == 50

    @pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 2), (2, 8), (4, 4), (4, 3), (4, 16), (8, 64)])
    def test_equal_stages_follow_the_closed_form(self, stages, micro):
        assert pipeline_ns([3] * stages, [7] * stages, micro, 0) == (micro + stages - 1) * 10

    def test_the_slowest_stage_sets_the_pace(self):
        assert pipeline_ns([3, 6], [7, 14], 10, 0) == 3 + 10 * 20 + 7
        assert pipeline_ns([6, 3], [14, 7], 10, 0) >= 10 * 20

    def test_sending_adds_at_least_one_way_there_and_back(self):
        base = pipeline_ns([3] * 4, [7] * 4, 8, 0)
        assert base + 6 * 5 <= pipeline_ns([3] * 4, [7] * 4, 8, 5) <= base + 8 * 8 * 5


class TestMemory:
    def test_the_measured_peak_of_one_gpu(self):
        """wan2.1-1.3b, 32,760 tokens, dense, full recomputation: torch's peak was 30.23 GiB."""
        sim = simulator("wan2.1-1.3b", 32760, 1, H200.with_gpus(1), sparse=False, recompute="full", ema=False)
        result = sim.simulate(JobLayout(1, 1, 1, 1))
        gib = sum(size for name, size in result.memory.items() if name != "base") / 2**30
        assert gib == pytest.approx(30.23, rel=0.05)

    @pytest.mark.parametrize("count", [1, 4, 7, 30])
    @pytest.mark.parametrize("method", ["uniform", "block"])
    def test_recomputation_keeps_and_repeats_what_it_says(self, method, count):
        """Against a walk back through the layers of a step; a last chunk that is shorter counts for a whole one."""
        layers, layout = 30, JobLayout(1, 1, 1, 1)

        def activations(recompute, **how):
            job = Job(model("wan2.1-1.3b"), 32768, 1, recompute_layers=count, **how)
            return memory_parts(job, layout, H200, recompute)["activations"]

        stored = 2 * 32768 * 1536
        whole = activations("none") // layers
        # Of the layer at hand, queries, keys, values and output are part of its attention.
        at_hand = whole - 4 * stored
        if method == "uniform":
            chunks = [range(first, min(first + count, layers)) for first in range(0, layers, count)]
        else:
            chunks = [range(layer, layer + 1) for layer in range(count)]
        kept = layers - sum(map(len, chunks))
        peak = len(chunks) * stored + kept * whole
        for number, chunk in reversed(list(enumerate(chunks))):
            peak = max(peak, (number + 1) * stored + (len(chunk) - 1) * whole + at_hand)
        assert 0 <= activations("full", recompute_method=method) - peak <= (stored if layers % count else 0)

    def test_layers_that_are_kept_are_not_repeated(self):
        def step(recompute, **how):
            sim = simulator("wan2.1-1.3b", 32768, 1, H200.with_gpus(1), sparse=False, recompute=recompute, **how)
            return sim.simulate(JobLayout(1, 1, 1, 1)).times

        none, whole = step("none"), step("full")
        third = step("full", recompute_method="block", recompute_layers=10)
        for part in ("linear", "attention", "elementwise"):
            low, high = getattr(none, part), getattr(whole, part)
            assert getattr(third, part) == pytest.approx(low + (high - low) / 3)
        assert step("full", recompute_layers=7) == whole

    def test_shards_and_stages_divide_what_they_should(self):
        job = Job(model("dsv-30b"), 131072, 128)
        small = memory_parts(job, JobLayout(8, 2, 4, 2), H200, "full")
        more_data = memory_parts(job, JobLayout(8, 2, 4, 16), H200, "full")
        assert more_data["weights"] == small["weights"]
        assert more_data["optimizer"] == pytest.approx(small["optimizer"] / 8, rel=1e-6)
        assert small["gradients"] == 2 * small["weights"]
        assert memory_parts(job, JobLayout(8, 1, 4, 4), H200, "full")["weights"] > 1.9 * small["weights"]
        kept = memory_parts(job, JobLayout(8, 2, 4, 2), H200, "none")
        assert kept["activations"] > 10 * small["activations"]


class TestLimits:
    job = Job(model("dsv-30b"), 131072, 32)

    @pytest.mark.parametrize(("layout", "words"), [
        (JobLayout(16, 1, 1, 8), "TP 16 must lie in one node of 8 GPUs"),
        (JobLayout(5, 1, 1, 1), "TP 5 must divide the 24 key/value heads"),
        (JobLayout(8, 4, 1, 4), "PP 4 must divide the 42 layers"),
        (JobLayout(1, 1, 1, 128), "DP 128 x micro batch 1 must divide the global batch 32"),
        (JobLayout(8, 1, 4096, 1), "whole query groups of 64 and key blocks of 64: 131072 of padding"),
    ])
    def test_each_is_named(self, layout, words):
        assert words in limit(layout, self.job, H200)

    def test_a_layout_that_breaks_none(self):
        assert limit(JobLayout(8, 2, 4, 2), self.job, H200) is None

    def test_a_layout_that_does_not_fit_names_what_fills_the_memory(self):
        sim = simulator("dsv-30b", 131072, 8, H800.with_gpus(8))
        refusal = sim.simulate(JobLayout(1, 1, 8, 1))
        assert isinstance(refusal, Refusal)
        assert refusal.short > 0
        assert "GiB of 75.0 that a GPU can use (gradients 111.5, weights 55.7" in refusal.reason
        with pytest.raises(ValueError, match=r"no layout of 8 GPUs fits; the nearest is TP 8 .*: memory: "):
            simulator("dsv-30b", 524288, 8, H800.with_gpus(8)).rank()

    def test_every_layout_is_enumerated_once(self):
        found = list(layouts(12))
        # 12 = 2 x 2 x 3: ten ways to place the twos among four sizes, four for the three.
        assert len(found) == len(set(found)) == 40
        assert all(a * b * c * d == 12 for a, b, c, d in found)

    def test_bad_jobs(self):
        with pytest.raises(ValueError, match="global batch must be at least 1, got 0"):
            Job(model("dsv-30b"), 131072, 0)
        with pytest.raises(ValueError, match="recompute must be one of auto, full, none, got 'some'"):
            Job(model("dsv-30b"), 131072, 1, recompute="some")
        with pytest.raises(ValueError, match="recompute method must be uniform or block, got 'all'"):
            Job(model("dsv-30b"), 131072, 1, recompute_method="all")
        with pytest.raises(ValueError, match="layout must take all 128 GPUs, got TP 1 x PP 1 x CP 1 x DP 1"):
            simulator("dsv-2.7b", 131072, 128).simulate(JobLayout(1, 1, 1, 1))


class TestAnchors:
    """Published and measured step times; every constant that was fitted to them is named where it is used."""

    @pytest.mark.parametrize(("sparse", "measured"), [(False, 2649.0), (True, 875.0)])
    @pytest.mark.parametrize("allowed", [(), (Split(4, 1),)])
    def test_the_artifacts_four_gpus_within_fifteen_percent(self, sparse, measured, allowed):
        """2.7B, 32,768 tokens, CP 4 by heads, forward and backward alone."""
        sim = simulator("dsv-2.7b", 32768, 1, cluster.load("h100x4"), ARTIFACT, Trace(cap=0.99), q_block=32,
                        kv_block=1, sparse=sparse, predictor_stride=0, recompute="none", optimizer=False, ema=False)
        sim.allowed = allowed
        assert sim.simulate(JobLayout(1, 1, 4, 1)).step_ms == pytest.approx(measured, rel=0.15)

    def test_a_measured_step_of_this_project(self):
        """wan2.1-1.3b, 32,760 tokens, dense on cuDNN, full recomputation, one H200: 2,489 ms."""
        cudnn = FittedKernels(32760, 12, 128, (11.7, 31.5), (0.0, 1.0), (0.0, 1.0), 1.0)
        sim = simulator("wan2.1-1.3b", 32760, 1, H200.with_gpus(1), cudnn, sparse=False, recompute="full", ema=False)
        assert sim.simulate(JobLayout(1, 1, 1, 1)).step_ms == pytest.approx(2489, rel=0.02)

    @pytest.mark.parametrize(("tokens", "gpus", "layout"), [
        (131072, 32, JobLayout(1, 1, 4, 8)), (262144, 64, JobLayout(1, 1, 8, 8)), (524288, 128, JobLayout(1, 1, 16,
         8))])
    def test_the_papers_range_of_the_small_model(self, tokens, gpus, layout):
        """2.1 to 3.02 times as fast as dense, 131k to 520k tokens on 32 to 128 GPUs, with the artifact's kernels."""
        assert 2.1 <= self.speedup("dsv-2.7b", tokens, H800.with_gpus(gpus), layout) <= 3.02

    @pytest.mark.parametrize(("tokens", "gpus", "layout"), [
        (65536, 64, JobLayout(1, 1, 8, 8)), (122880, 96, JobLayout(1, 1, 8, 12))])
    def test_the_papers_range_of_the_large_model(self, tokens, gpus, layout):
        """2.06 to 2.53; weights sharded over all ranks, as the paper trained it, so memory is no limit here."""
        roomy = replace(H800.with_gpus(gpus), memory_gib=1000)
        assert 2.06 <= self.speedup("dsv-30b", tokens, roomy, layout) <= 2.53

    def speedup(self, name, tokens, gpus, layout):
        sim = simulator(name, tokens, layout.dp, gpus, ARTIFACT, q_block=32, kv_block=1, predictor_stride=0,
                        recompute="full")
        return dense_twin(sim).simulate(layout).step_ms / sim.simulate(layout).step_ms


class TestRanking:
    def test_no_layout_that_was_not_listed_is_faster(self):
        sim = simulator("dsv-2.7b", 131072, 8, H200.with_gpus(8))
        best, refused = sim.rank(keep=3)
        every = [sim.simulate(layout) for layout in layouts(8)]
        ran = sorted((r for r in every if not isinstance(r, Refusal)), key=lambda r: (r.step_ms, r.layout))
        assert [r.layout for r in best] == [r.layout for r in ran[:3]]
        assert {r.layout for r in refused} <= {r.layout for r in every if isinstance(r, Refusal)}

    def test_times_add_up_to_the_step(self):
        for layout in (JobLayout(2, 2, 2, 1), JobLayout(1, 1, 8, 1), JobLayout(1, 4, 1, 2)):
            result = simulator("dsv-2.7b", 65536, 8, H200.with_gpus(8)).simulate(layout)
            assert sum(result.times) == pytest.approx(result.step_ms, rel=1e-4)
            assert sum(result.memory.values()) <= usable_bytes(H200)
            assert 0 < result.mfu <= result.dense_mfu
            assert result.tokens_per_s == pytest.approx(8 * 65536 / result.step_ms * 1e3)

    def test_dense_layers_stay_dense_and_sparse_ones_are_faster(self):
        sim = simulator("dsv-2.7b", 131072, 8, H200.with_gpus(8))
        result = sim.simulate(JobLayout(1, 1, 8, 1))
        assert [b.layer for b in result.blocks if not b.sparse] == [0, 1, 2, 31]
        twin = dense_twin(sim).simulate(JobLayout(1, 1, 8, 1))
        assert not any(b.sparse for b in twin.blocks)
        assert result.step_ms < 0.7 * twin.step_ms

    def test_a_thousand_ranks_of_context_parallelism_in_seconds(self):
        kernels = MeasuredKernels("NVIDIA H200", 64, 64)
        sim = simulator("dsv-30b", 1048576, 8, replace(H200.with_gpus(1024), memory_gib=10_000), kernels)
        start = time.process_time()
        result = sim.simulate(JobLayout(1, 1, 1024, 1))
        assert time.process_time() - start < 5
        assert len(result.blocks) == 42
        assert all(block.g_h * block.g_s == 1024 for block in result.blocks)


class TestTraces:
    def test_heads_keep_their_blocks_mean_and_are_not_sorted(self):
        for mean in (0.02, 0.3, 0.95):
            heads = spread_heads(mean, 24, 0.9)
            assert sum(heads) / 24 == pytest.approx(mean, rel=1e-6)
            assert max(heads) <= 1.0
            assert list(heads) not in (sorted(heads), sorted(heads, reverse=True))
        assert max(spread_heads(0.1, 16, 0.0)) == pytest.approx(0.1)

    def test_other_depths_take_the_same_relative_depth(self):
        trace = Trace(cap=0.99)
        assert trace.densities(32)[:3] == pytest.approx([0.988, 0.989, 0.978])
        deep = trace.densities(42)
        assert (deep[0], deep[-1]) == pytest.approx((0.988, 0.979))
        assert min(Trace(cap=0.9).densities(42)) == pytest.approx(0.1)

    def test_coverage_is_that_of_the_synthetic_selections(self):
        """Recorded at density 0.1, 15,360 tokens, cubes of 64; the fit is within a tenth."""
        for pattern, recorded in (("clustered", (0.95, 0.92, 0.84, 0.69)), ("hub", (0.13, 0.12, 0.12, 0.12)),
                                  ("local", (0.38, 0.42, 0.33, 0.30))):
            rows = modelled_coverage((0.1,), 1, tokens=15360, q_block=64, pattern=pattern, sizes=(2, 4, 8, 16))
            assert [units[0] for _, units in rows] == pytest.approx(recorded, abs=0.1)


class TestStagesAndPredictors:
    CLUSTER = H200.with_gpus(8)
    LAYOUT = JobLayout(2, 2, 2, 1)

    def ran(self, **job):
        result = simulator("wan2.1-1.3b", 32768, 4, self.CLUSTER, recompute="none", **job).simulate(self.LAYOUT)
        assert isinstance(result, Simulation)
        return result

    def test_uneven_stages_are_as_slow_and_as_full_as_their_longest(self):
        even, uneven = self.ran(sparse=False), self.ran(sparse=False, stages=(12, 18))
        assert self.ran(sparse=False, stages=(15, 15)) == even
        assert uneven.step_ms > 1.1 * even.step_ms
        assert uneven.times.attention == pytest.approx(even.times.attention * 18 / 15, rel=1e-6)
        # The first stage has two micro-batches in flight: with the most layers, too, it is the fullest.
        first = self.ran(sparse=False, stages=(18, 12))
        assert first.memory["activations"] == pytest.approx(even.memory["activations"] * 18 / 15, rel=1e-6)
        assert sum(first.memory.values()) > sum(uneven.memory.values())

    def test_a_number_of_layers_that_stages_do_not_divide(self):
        job = Job(model("dsv-30b"), 131072, 128)
        assert "PP 4 must divide the 42 layers" in limit(JobLayout(1, 4, 1, 2), job, self.CLUSTER)
        dealt = replace(job, stages=(9, 11, 11, 11))
        assert limit(JobLayout(1, 4, 1, 2), dealt, self.CLUSTER) is None
        assert limit(JobLayout(1, 2, 1, 4), dealt, self.CLUSTER) == (
            "PP 2 must be the 4 stages that the layers are dealt out to")
        with pytest.raises(ValueError, match=r"stages must hold all 42 layers, each at least 1, got \[42, 0\]"):
            replace(job, stages=(42, 0))

    def test_predictors_take_what_the_models_do(self):
        shape = model("wan2.1-1.3b")
        for hidden, channels in ((True, shape.hidden), (False, shape.head_dim)):
            job = Job(shape, 32768, 8, predictor_rank=8, predictor_reads_hidden=hidden)
            one = LowRankPredictor(
                layer_number=1, query_heads=range(6), key_heads=range(6), channels=channels, rank=8,
                input_kind="hidden" if hidden else "qk", seed=1, tp_group=None)
            assert predictor_parameters(job, 2) == sum(weight.numel() for weight in one.weights())

    def test_predictors_that_learn_in_dense_attention_cost_memory_and_time(self):
        without, learning = self.ran(sparse=False), self.ran(sparse=False, predictors=True)
        assert without.memory["predictors"] == without.times.predictors == 0
        assert learning.memory["predictors"] > 0
        assert learning.step_ms - without.step_ms >= learning.times.predictors > 0
        assert not any(block.sparse for block in learning.blocks)

    def test_windows_are_sparse_whatever_is_faster(self):
        full = [BlockStats((1.0,) * 12)] * 30
        for dispatches in (True, False):
            job = Job(model("wan2.1-1.3b"), 32768, 4, dispatches=dispatches, predictors=False)
            simulator = Simulator(self.CLUSTER, KERNELS, job, lambda tokens: full)
            result = simulator.simulate(self.LAYOUT)
            assert {block.sparse for block in result.blocks} == {not dispatches}
            # Without an exchange of keys, nothing is left of a selection.
            assert simulator.simulate(JobLayout(2, 2, 1, 2)).times.selection == 0
            assert result.memory["predictors"] == 0

    @pytest.mark.parametrize(("q", "kv", "tp", "cp"), [(64, 64, 1, 1), (64, 128, 1, 2), (16, 1, 4, 2), (64, 96, 8, 4)])
    def test_padding_is_that_of_a_run(self, q, kv, tp, cp):
        dsv = DSVConfig(dsv_q_block_size=q, dsv_kv_block_size=kv)
        job = Job(model("wan2.1-1.3b"), 7 * 5 * 6, 8, q_block=q, kv_block=kv)
        run = latent_layout((7, 10, 12), VideoDiTConfig(), dsv, tp, cp)
        assert job.padded_tokens(JobLayout(tp, 1, cp, 1)) == run.padded_length
        assert run.padded_length // cp % q == run.padded_length // cp % tp == 0
