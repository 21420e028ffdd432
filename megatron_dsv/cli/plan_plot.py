"""The plot of ``dsv plan``: where a step's time goes, and what each block's plan is."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dsv.context_parallel.simulator import Simulation, Simulator


def plot(results: Sequence[tuple[Simulator, Sequence[Simulation], Simulation | None]], path: str) -> None:
    """One row per sequence length: stacked times of sparse and dense, then time and g_h by layer.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed; use --json, or install it") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 2, figsize=(13, 3.6 * len(results)), squeeze=False,
                                   width_ratios=(2, 3))
    for (simulator, found, dense), (left, right) in zip(results, axes):
        bars = [("sparse" if simulator.job.sparse else "dense", found[0]), *([("best dense", dense)] if dense else [])]
        bottom = [0.0] * len(bars)
        for name in found[0].times._fields:
            heights = [getattr(result.times, name) / 1e3 for _, result in bars]
            if max(heights) > 0:
                left.bar([label for label, _ in bars], heights, bottom=bottom, label=name.replace("_", " "))
                bottom = [low + height for low, height in zip(bottom, heights)]
        left.set_ylabel("seconds")
        left.set_title(f"{simulator.job.model.name}, {simulator.job.tokens:,} tokens, {found[0].layout}", fontsize=9)
        left.set_xlim(-0.6, len(bars) + 0.4)
        left.legend(fontsize=7, loc="center right")
        layers = range(len(found[0].blocks))
        colours = ["tab:green" if block.sparse else "tab:grey" for block in found[0].blocks]
        right.bar(layers, [cost.total / 1e6 for cost in found[0].costs], color=colours)
        right.set_ylabel("attention, ms (grey: dense)")
        right.set_xlabel("layer")
        split = right.twinx()
        split.step(layers, [block.g_h for block in found[0].blocks], where="mid", color="tab:red")
        split.set_ylim(0, max(2, found[0].layout.cp) + 0.5)
        split.set_ylabel("g_h", color="tab:red")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
