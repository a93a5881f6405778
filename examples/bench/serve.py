"""``serve``: backends one after the other, progress, tables, JSON."""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from . import machine
from .children import serve_loads, serve_workloads
from .engine import MAX_SEQS, Engine
from .engine_arguments import make_engine
from .model import write_llama
from .process import ChildError, ended_by_sigterm
from .results import write_json
from .serve_arguments import Plan, make_plan
from .serve_table import load_table, workload_table
from .server import ServerStartError
from .table import Bar, console, print_machine
from .workloads import Workload

__all__ = ["merge_turns", "serve"]

Advance = Callable[[str], None]


def serve(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Returns 1 if a backend fails. refuse: ends with a message and status 2."""
    gpu = torch.cuda.is_available()
    plan = make_plan(args, gpu, refuse)
    out = console()
    about = machine.describe(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    print_machine(out, about, {})
    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}

    def keep() -> None:
        if args.json:  # what there is, should a later backend never end
            content = {
                "command": args.line,
                "machine": about,
                "model": plan.model or "shape of Llama 8B, random weights",
                "backends": found,
                "failures": failures,
            }
            write_json(args.json, content)

    with ended_by_sigterm():
        _measure_all(plan, args, out, found, failures, keep)
    if plan.workloads:
        out.print(workload_table(found))
    if plan.loads:
        out.print(load_table(found))
    return 1 if failures else 0


def _measure_all(
    plan: Plan,
    args: argparse.Namespace,
    out: Console,
    found: dict[str, dict[str, Any]],
    failures: dict[str, str],
    keep: Callable[[], None],
) -> None:
    """Fill in what is found and what fails; keep is called after each turn of a backend."""
    runs = plan.turns * len(plan.workloads) + len(plan.loads)
    total = runs * len(plan.backends)
    max_seqs = MAX_SEQS if plan.gpu else max([w.requests for w in plan.workloads] + [16])
    with tempfile.TemporaryDirectory() as scratch, Bar(out, total) as bar:
        if plan.model is None:
            write_llama(Path(scratch))
        for turn, backend in itertools.product(range(plan.turns), plan.backends):
            if backend in failures:
                continue

            def advance(what: str, backend: str = backend) -> None:
                bar.done(f"{backend}: {what}")

            bar.say(f"{backend}: starting")
            engine = make_engine(args, backend, plan.gpu, scratch, max_seqs)
            last = turn == plan.turns - 1
            try:
                _measure(engine, plan, args, found.setdefault(backend, {}), last, advance)
            except (ChildError, ServerStartError) as error:
                failures[backend] = str(error)
                out.print(f"{backend} failed: {error}", markup=False)
            keep()


def _measure(
    engine: Engine,
    plan: Plan,
    args: argparse.Namespace,
    result: dict[str, Any],
    last: bool,
    advance: Advance,
) -> None:
    """One turn of a backend, added to its result; the loads in the last turn."""
    if plan.workloads:

        def row(row: Mapping[str, Any]) -> None:
            one = Workload(row["requests"], row["tokens_in"], row["tokens_out"])
            advance(f"{one}: {row['output_tokens_per_s']:.1f} tokens/s")

        turn = serve_workloads(engine, plan.workloads, args.rounds, args.timeout, row)
        result.setdefault("turns", []).append(turn)
        result["rows"] = merge_turns(result["turns"])
    if plan.loads and last:

        def load(row: Mapping[str, Any]) -> None:
            advance(f"{row['completed']} requests: {row['output_tokens_per_s']:.1f} tokens/s")

        result["loads"] = serve_loads(engine, plan.loads, args.timeout, load)


def merge_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each workload: the last turn's, with the medians of all turns."""
    merged = []
    for rows in zip(*(turn["rows"] for turn in turns), strict=True):
        row = dict(rows[-1])
        rounds = [seconds for one in rows for seconds in one["rounds"]]
        scale = row["seconds"] / statistics.median(rounds)
        row["rounds"], row["seconds"] = rounds, statistics.median(rounds)
        for name in ("output_tokens_per_s", "total_tokens_per_s"):
            row[name] *= scale
        for name in ("itl_ms_mean", "itl_ms_p99"):
            if row[name] is not None:
                row[name] = statistics.median(one[name] for one in rows)
        merged.append(row)
    return merged
