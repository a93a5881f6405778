"""``memory``: backends one after the other, progress, table, JSON, plot."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from . import machine
from .children import serve_waves
from .engine import MAX_SEQS
from .engine_arguments import make_engine
from .memory_arguments import MemoryPlan, make_memory_plan
from .memory_table import memory_table
from .model import write_llama
from .process import ChildError, ended_by_sigterm
from .results import write_json
from .table import Bar, console, print_machine
from .timeline import Timeline

__all__ = ["memory"]


def memory(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Returns 1 if a backend fails. refuse: ends with a message and status 2."""
    gpu = torch.cuda.is_available()
    plan = make_memory_plan(args, gpu, refuse)
    out = console()
    about = machine.describe(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    print_machine(out, about, {})
    found: dict[str, Timeline] = {}
    failures: dict[str, str] = {}

    def keep() -> None:
        if args.json:  # what there is, should a later backend never end
            content = {
                "command": args.line,
                "machine": about,
                "model": args.model or "shape of Llama 8B, random weights",
                "backends": {name: asdict(timeline) for name, timeline in found.items()},
                "failures": failures,
            }
            write_json(args.json, content)

    with ended_by_sigterm():
        _measure_all(plan, args, out, found, failures, keep)
    if found:
        out.print(memory_table(found))
    if args.plot and found:
        from .memory_plot import plot_memory

        plot_memory(args.plot, found, f"{about['device']}, vLLM {about['vllm']}")
    return 1 if failures else 0


def _measure_all(
    plan: MemoryPlan,
    args: argparse.Namespace,
    out: Console,
    found: dict[str, Timeline],
    failures: dict[str, str],
    keep: Callable[[], None],
) -> None:
    """Fill in what is found and what fails; keep is called after each backend."""
    max_seqs = MAX_SEQS if plan.gpu else max([wave.requests for wave in plan.waves] + [16])
    total = len(plan.backends) * len(plan.waves)
    with tempfile.TemporaryDirectory() as scratch, Bar(out, total) as bar:
        if args.model is None:
            write_llama(Path(scratch))
        for backend in plan.backends:

            def advance(wave: Mapping[str, Any], backend: str = backend) -> None:
                bar.done(f"{backend}: a wave of {wave['end'] - wave['begin']:.1f} s")

            bar.say(f"{backend}: starting")
            engine = make_engine(args, backend, plan.gpu, scratch, max_seqs)
            try:
                found[backend] = serve_waves(engine, plan.waves, plan.pause, args.timeout, advance)
            except ChildError as error:
                failures[backend] = str(error)
                out.print(f"{backend} failed: {error}", markup=False)
            keep()
