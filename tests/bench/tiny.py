"""Steps small enough for the CPU, and a backend that can be made wrong."""

from collections.abc import Callable

import torch

from vllm_kv_columns.bench.backend import Backend, Step
from vllm_kv_columns.bench.columns import Columns
from vllm_kv_columns.bench.problem import Problem, make_pool
from vllm_kv_columns.bench.shapes import Shape

CPU = torch.device("cpu")


def shape(
    name: str, kind: str, *lengths: tuple[int, int], window: int | None = None, heads: int = 2
) -> Shape:
    return Shape(name, kind, lengths, heads, group=2, head_size=16, window=window, layers=3)


TINY = (
    shape("decode", "decode", (1, 40), (1, 7), (1, 33)),
    shape("ring", "decode", (1, 400), (1, 301), window=20),
    shape("verify", "verify", (3, 40), (3, 11)),
    shape("prefill", "prefill", (40, 40), (9, 9)),
    shape("windowed-prefill", "prefill", (340, 340), window=30),
    shape("chunk", "prefill", (20, 63)),
    shape("mixed", "mixed", (1, 40), (1, 17), (25, 50)),
    shape("one-head", "decode", (1, 40), (1, 50), heads=1),
    shape("step", "step", (1, 40), (1, 7)),
)


def problem(of: Shape) -> Problem:
    return Problem(of, make_pool([of], CPU))


class Spoiled(Backend):
    """Ours on the CPU, with something done to each layer after it ran."""

    name = "ours"
    title = "spoiled"

    def __init__(self, spoil: Callable[[Step, int], None]) -> None:
        self._spoil = spoil

    def obstacle(self, device: torch.device) -> str | None:
        return None

    def step(self, problem: Problem) -> Step:
        step = Columns("torch-sdpa").step(problem)
        layer = step.layer

        def spoiled(index: int) -> None:
            layer(index)
            self._spoil(step, index)

        step.layer = spoiled  # type: ignore[method-assign]
        return step
