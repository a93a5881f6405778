"""Arguments about the engine, alike for ``serve`` and ``memory``."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from .engine import Engine
from .workloads import OURS, STOCK

__all__ = ["CPU_BACKENDS", "add_engine", "check_engine", "make_engine"]

CPU_BACKENDS = (STOCK, OURS)


def add_engine(command: argparse.ArgumentParser, gpu_backends: Sequence[str]) -> None:
    command.add_argument("--model", help="a folder that vLLM loads, instead of random weights")
    command.add_argument(
        "--backends",
        nargs="+",
        help=f"names of vLLM's, or {STOCK!r} for its own choice; "
        f"on a GPU {' '.join(gpu_backends)}, on the CPU {' '.join(CPU_BACKENDS)}",
    )
    command.add_argument("--utilization", type=float, default=0.8, help="of the GPU's memory")
    command.add_argument("--dtype", default="auto", help="of the model")
    command.add_argument("--enforce-eager", action="store_true", help="no graphs, no torch.compile")
    command.add_argument(
        "--timeout", type=float, default=600, help="seconds until a process is given up"
    )


def check_engine(args: argparse.Namespace, gpu: bool, refuse: Callable[[str], NoReturn]) -> None:
    if not gpu and args.model is None:
        refuse(f"torch finds no CUDA device, and on the CPU {args.command} needs --model")
    if not 0 < args.utilization <= 1:
        refuse("--utilization must be above 0 and at most 1")


def make_engine(
    args: argparse.Namespace, backend: str, gpu: bool, random_model: str, max_seqs: int
) -> Engine:
    """random_model: the folder for where no model was named."""
    return Engine(
        backend=backend,
        model=args.model or random_model,
        dummy=args.model is None,
        gpu=gpu,
        utilization=args.utilization,
        max_seqs=max_seqs,
        eager=args.enforce_eager,
        dtype=args.dtype,
    )
