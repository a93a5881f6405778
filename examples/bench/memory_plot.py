"""Bytes over time as a picture. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path

from .timeline import CACHE, Timeline
from .workloads import OURS

__all__ = ["floor", "plot_memory"]

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


def floor(found: Mapping[str, Timeline]) -> int:
    """Bytes that are in use without a cache: what ours has in use when idle, where it is measured.

    0 where the cache itself is measured, or where only others are.
    """
    if OURS not in found or found[OURS].measured == CACHE:
        return 0
    return found[OURS].idle


def plot_memory(file: Path, found: Mapping[str, Timeline], title: str) -> None:
    """Write a PNG: for each backend an axis with its memory as an area, live tokens as a line.

    All axes have the same scales. What is in use without a cache is taken off.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    under = floor(found)
    largest = max(max([*one.used, *(under + live for live in one.live)]) for one in found.values())
    size, unit = next((pair for pair in UNITS if largest - under >= pair[0]), UNITS[-1])
    figure, grid = pyplot.subplots(
        len(found),
        figsize=(9, 1 + 2.5 * len(found)),
        dpi=120,
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axes, (backend, timeline) in zip(grid[:, 0], found.items(), strict=True):
        used = [(bytes_ - under) / size for bytes_ in timeline.used]
        live = [bytes_ / size for bytes_ in timeline.live]
        axes.fill_between(timeline.seconds, used, alpha=0.4, label=timeline.measured)
        axes.plot(timeline.seconds, live, color="black", linewidth=1.2, label="live tokens")
        for wave in timeline.waves:
            axes.axvline(wave.begin, color="gray", linewidth=0.8, linestyle=":")
            axes.annotate(
                f" {wave.workload}",
                (wave.begin, 1),
                xycoords=("data", "axes fraction"),
                va="bottom",
                fontsize=7,
            )
        axes.set_ylabel(f"{backend}\n{unit}")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize=8)
    grid[-1, 0].set_xlabel("seconds")
    if under:
        title += f"; {under / size:.1f} {unit} in use by an idle {OURS} taken off"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
