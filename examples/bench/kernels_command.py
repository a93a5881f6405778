"""``kernels``: progress, table, JSON, plot."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from rich.console import Console

from . import machine
from .backend import Backend
from .kernels import make_backend, run, sort_out
from .results import Figure, ShapeResult, write_json
from .shapes import Shape, select
from .table import Bar, console, kernel_table, print_failures, print_machine

__all__ = ["kernels", "measure_and_show"]


def kernels(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Returns 1 if ours is wrong or fails on a shape. refuse: ends with a message and status 2."""
    from ..kv_manager import ConfigError

    try:
        shapes = select(args.shapes)
        backends = [make_backend(name, args.kernel) for name in dict.fromkeys(args.backends)]
    except (ValueError, ConfigError) as error:
        refuse(str(error))
    if args.seconds <= 0 or args.bound <= 0:
        refuse("--seconds and --bound must be above 0")
    if not torch.cuda.is_available():
        refuse("kernels needs a CUDA device, and torch finds none")
    return measure_and_show(args, shapes, backends, torch.device("cuda", 0))


def measure_and_show(
    args: argparse.Namespace,
    shapes: Sequence[Shape],
    backends: Sequence[Backend],
    device: torch.device,
) -> int:
    """The whole command but for its refusals; on the CPU without the measures of the machine."""
    out = console()
    found, missing = sort_out(backends, device)
    about = machine.describe(device)
    if device.type == "cuda":
        about |= machine.measure(device)
        torch.cuda.empty_cache()
    anchors = {
        backend.name: {"found": backend in found, "title": backend.title}
        | ({"reason": missing[backend.name]} if backend.name in missing else {})
        for backend in backends
    }
    print_machine(out, about, anchors)
    if not found:
        out.print("none of the backends can run here")
        return 1
    try:
        results = _run(args, shapes, found, device, out)
    except torch.OutOfMemoryError:
        need = max(shape.pool_elements for shape in shapes) * 2 / 2**30
        out.print(f"the caches need {need:.1f} GiB of free device memory: choose other --shapes")
        return 1
    out.print(kernel_table(results))
    print_failures(out, results)
    if args.json:
        content = {
            "command": args.line,
            "machine": about,
            "anchors": anchors,
            "shapes": [result.as_json() for result in results],
        }
        write_json(args.json, content)
    if args.plot:
        from .plot import plot_ratios

        plot_ratios(args.plot, results, f"{about['device']}, vLLM {about['vllm']}")
    return 0 if _ours_is_right(results) else 1


def _run(
    args: argparse.Namespace,
    shapes: Sequence[Shape],
    found: Sequence[Backend],
    device: torch.device,
    out: Console,
) -> list[ShapeResult]:
    """With a progress bar."""
    with Bar(out, len(shapes) * len(found)) as bar:
        bar.say("filling memory")

        def report(shape: Shape, backend: Backend, figure: Figure) -> None:
            value = figure.failure if figure.us is None else f"{figure.us:.1f} us"
            bar.done(f"{shape.name}, {backend.name}: {value}")

        return run(shapes, found, device, seconds=args.seconds, bound=args.bound, report=report)


def _ours_is_right(results: Sequence[ShapeResult]) -> bool:
    return all(
        figure.failure is None
        for result in results
        for name, figure in result.figures.items()
        if name == "ours"
    )
