"""Arguments of ``memory``, and what they mean on this machine."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .engine import max_length
from .engine_arguments import CPU_BACKENDS, add_engine, check_engine
from .workloads import OURS, Workload

__all__ = ["MemoryPlan", "add_memory", "make_memory_plan"]

GPU_BACKENDS = (OURS, "FLASH_ATTN")
GPU_WAVES = ("16x1024+256", "256x1024+256", "32x8000+128", "4x1024+256")
CPU_WAVES = ("2x128+64", "16x256+64", "4x1000+32")


@dataclass(frozen=True)
class MemoryPlan:
    """pause: idle seconds after each wave."""

    gpu: bool
    backends: tuple[str, ...]
    waves: tuple[Workload, ...]
    pause: float


def add_memory(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    memory = commands.add_parser(
        "memory",
        help="bytes over time under a load that rises and falls, against stock vLLM",
        description="Bytes of memory and of live tokens over time while waves of requests are "
        "served with pauses between them, against stock vLLM. Memory is what the GPU has in use, "
        "or the cache on the CPU, where --model is needed; without it the model is of the shape "
        "of an 8B Llama with random weights. Each backend runs in a process of its own, one after "
        "the other. Ends with 1 if one of them fails.",
    )
    add_engine(memory, GPU_BACKENDS)
    memory.add_argument(
        "--waves",
        nargs="+",
        metavar="NxIN+OUT",
        help="requests at once x tokens in + tokens out, one wave after the other; "
        f"on a GPU {' '.join(GPU_WAVES)}, on the CPU {' '.join(CPU_WAVES)}",
    )
    memory.add_argument("--pause", type=float, default=4, help="idle seconds after each wave")
    memory.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    memory.add_argument("--plot", type=Path, metavar="FILE", help="write the bytes as a PNG")


def make_memory_plan(
    args: argparse.Namespace, gpu: bool, refuse: Callable[[str], NoReturn]
) -> MemoryPlan:
    """Fill in what was not given, and refuse what makes no sense."""
    try:
        waves = [Workload.parse(text) for text in args.waves or (GPU_WAVES if gpu else CPU_WAVES)]
    except ValueError as error:
        refuse(str(error))
    check_engine(args, gpu, refuse)
    if min(args.pause, args.timeout) <= 0:
        refuse("--pause and --timeout must be above 0")
    for wave in waves:
        longest = max(wave.prompt_lengths(uneven=not gpu)) + wave.tokens_out
        if longest > max_length(gpu):
            refuse(
                f"a request of {wave} has up to {longest} tokens, and the engine takes "
                f"{max_length(gpu)}"
            )
    return MemoryPlan(
        gpu=gpu,
        backends=tuple(dict.fromkeys(args.backends or (GPU_BACKENDS if gpu else CPU_BACKENDS))),
        waves=tuple(waves),
        pause=args.pause,
    )
