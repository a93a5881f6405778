"""The ratios of a run as a picture. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from .results import ShapeResult

__all__ = ["plot_ratios"]

LABELS = {"fa3": "FlashAttention-3", "triton": "vLLM's Triton kernel"}


def plot_ratios(file: Path, results: Sequence[ShapeResult], title: str) -> None:
    """Write a PNG: for each shape, the time of each anchor over ours, as bars from a line at 1.

    Bars that go up are shapes on which ours is faster. The axis is logarithmic.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.75 * len(results) + 2), 5), dpi=120)
    anchors = [name for name in LABELS if any(result.ratio(name) for result in results)]
    width = 0.8 / max(1, len(anchors))
    for number, name in enumerate(anchors):
        pairs = [(at, result.ratio(name)) for at, result in enumerate(results)]
        bars = [(at, ratio) for at, ratio in pairs if ratio is not None]
        axes.bar(
            [at + (number - (len(anchors) - 1) / 2) * width for at, _ in bars],
            [ratio - 1 for _, ratio in bars],
            width,
            bottom=1,
            label=f"{LABELS[name]} / ours",
        )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylabel("time over ours")
    axes.set_xticks(range(len(results)), [result.shape.name for result in results])
    axes.tick_params(axis="x", labelrotation=60)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
        label.set_rotation_mode("anchor")
    axes.set_title(title)
    if anchors:
        axes.legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
