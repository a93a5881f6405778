"""Arguments of ``serve``, and what they mean on this machine."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .engine_arguments import CPU_BACKENDS, add_engine, check_engine
from .workloads import OURS, Load, Workload

__all__ = ["Plan", "add_serve", "make_plan"]

GPU_BACKENDS = (OURS, "FLASH_ATTN", "TRITON_ATTN")
GPU_WORKLOADS = ("256x1024+256", "32x15000+64", "1x128+256")
GPU_RATES = (4.0, 8.0, 16.0)
CPU_WORKLOADS = ("16x128+128",)
LOAD_SECONDS = 12  # that a load lasts, where its number of requests is not given


@dataclass(frozen=True)
class Plan:
    """model: a folder or name; None for the shape of an 8B Llama with random weights."""

    gpu: bool
    backends: tuple[str, ...]
    workloads: tuple[Workload, ...]
    loads: tuple[Load, ...]
    turns: int
    model: str | None


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="a server's tokens per second and latency against stock vLLM",
        description="Tokens per second, latency from token to token and memory of serving, against "
        "stock vLLM in the same run. On a GPU the model is of the shape of an 8B Llama with random "
        "weights; on the CPU --model is needed. Each backend runs in processes of its own, one "
        "after the other. Ends with 1 if one of them fails.",
    )
    add_engine(serve, GPU_BACKENDS)
    serve.add_argument(
        "--workloads",
        nargs="*",
        metavar="NxIN+OUT",
        help="requests at once x tokens in + tokens out; "
        f"on a GPU {' '.join(GPU_WORKLOADS)}, on the CPU {' '.join(CPU_WORKLOADS)}",
    )
    serve.add_argument(
        "--rates",
        nargs="*",
        type=float,
        metavar="R",
        help="requests a second of `vllm bench serve`, one load each; on a GPU "
        f"{' '.join(f'{rate:g}' for rate in GPU_RATES)}, on the CPU none",
    )
    serve.add_argument(
        "--load", default="1024+256", metavar="IN+OUT", help="tokens of each request of a load"
    )
    serve.add_argument(
        "--requests", type=int, help=f"of each load; for {LOAD_SECONDS} s if not given"
    )
    serve.add_argument("--rounds", type=int, default=1, help="of each workload; medians count")
    serve.add_argument("--turns", type=int, help="processes of each backend; 1, on the CPU 2")
    serve.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def make_plan(args: argparse.Namespace, gpu: bool, refuse: Callable[[str], NoReturn]) -> Plan:
    """Fill in what was not given, and refuse what makes no sense."""
    workloads = args.workloads
    if workloads is None:
        workloads = GPU_WORKLOADS if gpu else CPU_WORKLOADS
    rates = args.rates if args.rates is not None else GPU_RATES if gpu else ()
    try:
        each = Workload.parse(f"1x{args.load}")
        parsed = tuple(Workload.parse(text) for text in workloads)
    except ValueError as error:
        refuse(str(error))
    check_engine(args, gpu, refuse)
    if not parsed and not rates:
        refuse("nothing to serve: give --workloads, --rates or both")
    counts = [args.rounds] + [n for n in (args.requests, args.turns) if n is not None]
    if min(counts) < 1 or min([args.timeout, *rates]) <= 0:
        refuse("--rounds, --requests, --turns, --rates and --timeout must be above 0")
    return Plan(
        gpu=gpu,
        backends=tuple(args.backends or (GPU_BACKENDS if gpu else CPU_BACKENDS)),
        workloads=parsed,
        loads=tuple(
            Load(
                rate,
                args.requests or max(1, round(LOAD_SECONDS * rate)),
                each.tokens_in,
                each.tokens_out,
            )
            for rate in rates
        ),
        turns=args.turns or (1 if gpu else 2),
        model=args.model,
    )
