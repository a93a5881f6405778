"""The commands, and the arguments of ``kernels``."""

import argparse
import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path

from .memory_arguments import add_memory
from .serve_arguments import add_serve

__all__ = ["main", "parser"]

PROGRAM = "python -m vllm_kv_columns.bench"


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=PROGRAM, description="Benchmarks of kernels, of serving and of its memory."
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="{kernels,serve,memory}")
    add_kernels(commands)
    add_serve(commands)
    add_memory(commands)
    return whole


def add_kernels(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from .kernels import BACKENDS
    from .oracle import BOUND

    kernels = commands.add_parser(
        "kernels",
        help="a layer's attention against vLLM's kernels",
        description="Microseconds of a layer of attention, everything included that a step needs "
        "(schedule, KV write, attention, merge), against vLLM's own kernels in the same run. "
        "Needs a CUDA device. Ends with 1 if a result of ours is wrong.",
    )
    kernels.add_argument(
        "--shapes", nargs="+", default=[], metavar="PART", help="only shapes with it in their name"
    )
    kernels.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    kernels.add_argument(
        "--kernel", default="triton", help="of ours, by the name it is registered under"
    )
    kernels.add_argument("--seconds", type=float, default=0.3, help="of replays for each figure")
    kernels.add_argument("--bound", type=float, default=BOUND, help="largest relative error")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    kernels.add_argument("--plot", type=Path, metavar="FILE", help="write the ratios as a PNG")


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns 0, or 1 where something that had to work did not."""
    whole = parser()
    args = whole.parse_args(arguments)
    args.line = shlex.join(["python", "-m", "vllm_kv_columns.bench", *arguments])
    if args.command == "serve":
        from .serve import serve

        return serve(args, whole.error)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        whole.error("--plot needs matplotlib: pip install 'vllm-kv-columns[bench]'")
    if args.command == "memory":
        from .memory_command import memory

        return memory(args, whole.error)
    from .kernels_command import kernels

    return kernels(args, whole.error)
