"""Every parallel layout computes what one rank computes, in all stages, from one checkpoint."""

import pytest

DP2, TP2, PP2 = "", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "dp2": (2, DP2),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "tp2": (2, TP2),
    "tp2-sp": (2, f"{TP2} --sequence-parallel"),
    "pp2": (2, PP2),
    "tp2-sp-pp2": (4, f"{TP2} {PP2} --sequence-parallel"),
    "pp2-dp2-distributed-optimizer": (4, f"{PP2} --use-distributed-optimizer"),
    "recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-tp2-sp-selective": (2, f"{TP2} --sequence-parallel --recompute-granularity selective"),
}
STAGES = {
    "dense": "--dsv-sparse-stage dense",
    "predictor": "--dsv-sparse-stage predictor",
    "sparse": "--dsv-sparse-stage sparse --dsv-keep-ratio 0.5 --dsv-freeze-selection",
}


@pytest.fixture(scope="module")
def start(train, tmp_path_factory):
    """Checkpoints with predictors, written by one rank after two steps; Megatron's two optimizers differ in format."""
    folders = {}
    for flag in ("", "--use-distributed-optimizer"):
        folders[flag] = tmp_path_factory.mktemp("start")
        train(f"{flag} --dsv-sparse-stage predictor --save {folders[flag]} --save-interval 2", steps=2)
    return folders


@pytest.fixture(scope="module")
def one_rank(train, start):
    return {stage: train(f"{flags} --load {start['']}", steps=7) for stage, flags in STAGES.items()}


# Mixtures that the sparse stage, which runs what the others run and more, already goes through.
SLOW = ("dp2-distributed-optimizer", "pp2-dp2-distributed-optimizer", "recompute", "recompute-tp2-sp-selective")


@pytest.mark.parametrize(("stage", "layout"), [
    pytest.param(stage, layout, id=f"{stage}-{layout}",
                 marks=[pytest.mark.slow] if stage != "sparse" and layout in SLOW else [])
    for stage in STAGES for layout in LAYOUTS])
def test_layout_equals_one_rank(train, start, one_rank, stage, layout):
    ranks, flags = LAYOUTS[layout]
    folder = start["--use-distributed-optimizer" if "distributed" in flags else ""]
    log, expected = train(f"{STAGES[stage]} {flags} --load {folder}", ranks, steps=7), one_rank[stage]
    assert log.iterations == expected.iterations == [3, 4, 5, 6, 7]
    assert log.loss("loss") == pytest.approx(expected.loss("loss"), rel=1e-5)
    assert log.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert log.validation[-1][1]["loss"] == pytest.approx(expected.validation[-1][1]["loss"], rel=1e-5)


def test_stages_differ(one_rank):
    """The comparison above would be worth nothing if the sparse stage attended to everything."""
    assert one_rank["dense"].loss("loss") == one_rank["predictor"].loss("loss")
    assert one_rank["sparse"].loss("loss")[0] != one_rank["dense"].loss("loss")[0]
