"""Tables for a terminal, made with rich."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .results import ShapeResult

__all__ = ["Bar", "console", "kernel_table", "print_failures", "print_machine"]


def console(width: int | None = None, file: Any = None) -> Console:
    """Wide enough for the tables where the output is no terminal."""
    out = Console(width=width, file=file, highlight=False)
    if width is None and not out.is_terminal:
        out.width = 160
    return out


class Bar:
    """A progress bar that is gone in the end; where there is no terminal, a line for each step."""

    def __init__(self, out: Console, total: int) -> None:
        self._out = out
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[at]}", markup=False),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, at="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, what: str) -> None:
        """What goes on now."""
        self._progress.update(self._task, at=what)

    def done(self, what: str) -> None:
        """One step more, and what came of it."""
        self._progress.update(self._task, advance=1, at=what)
        if not self._out.is_terminal:
            self._out.print(what, markup=False)


def print_machine(
    out: Console, machine: Mapping[str, Any], anchors: Mapping[str, Mapping[str, Any]]
) -> None:
    """The header of a run, with the anchors that were found and those that were not."""
    names = ["torch", "triton", "vllm", "cuda", "driver"]
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    out.print(f"{machine['device']}: {versions}", markup=False)
    if "copy_tb_per_s" in machine:
        out.print(
            f"device copy {machine['copy_tb_per_s']} TB/s, read {machine['read_tb_per_s']} TB/s, "
            f"8192^3 product {machine['matmul_tflop_per_s']} TFLOP/s",
            markup=False,
        )
    for name, anchor in anchors.items():
        if anchor["found"]:
            out.print(f"{name}: {anchor['title']}", markup=False)
        else:
            out.print(f"{name}: not found, going on without it: {anchor['reason']}", markup=False)


def kernel_table(results: Sequence[ShapeResult]) -> Table:
    """A row for each shape: microseconds of a layer, rate, ratios and error of ours.

    The rate is in TB/s of K and V where memory bounds the step, else in TFLOP/s.
    """
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    table = Table(title="microseconds of a layer (rate)")
    table.add_column("shape", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    anchors = [name for name in names if name != "ours"] if "ours" in names else []
    for name in anchors:
        table.add_column(f"{name} / ours", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for result in results:
        row: list[str | Text] = [result.shape.name]
        row += [_figure(result, name) for name in names]
        for name in anchors:
            ratio = result.ratio(name)
            style = "" if ratio is None else "green" if ratio >= 1 else "red"
            row.append(Text("-" if ratio is None else f"{ratio:.2f}", style=style))
        error = result.figures["ours"].error if "ours" in result.figures else None
        row.append("-" if error is None else f"{error:.1e}")
        table.add_row(*row)
    return table


def _figure(result: ShapeResult, name: str) -> Text:
    figure = result.figures.get(name)
    if figure is None:
        return Text("-")
    if figure.us is None:
        return Text("WRONG" if figure.wrong else "failed", style="bold red")
    if result.shape.kind in ("decode", "verify", "step"):
        return Text(f"{figure.us:,.1f} ({result.tb_per_s(name):.2f} TB/s)")
    return Text(f"{figure.us:,.1f} ({result.tflop_per_s(name):,.0f} TFLOP/s)")


def print_failures(out: Console, results: Sequence[ShapeResult]) -> None:
    """A line for each figure that is missing, with the reason."""
    for result in results:
        for name, figure in result.figures.items():
            if figure.failure:
                out.print(f"{result.shape.name}, {name}: {figure.failure}", markup=False)
