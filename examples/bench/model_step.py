"""A step between the other kernels of a Llama's layers."""

import torch
from torch.nn.functional import rms_norm, silu

from .backend import Step
from .shapes import Shape

__all__ = ["ModelStep", "weight_sizes"]


def weight_sizes(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a layer's weights: q/k/v, output, gate and up, down.

    As wide as the query heads, in between 3.5 times as wide: what an 8B Llama has.
    """
    width = shape.query_heads * shape.head_size
    inner = width * 7 // 2
    projected = width + 2 * shape.heads * shape.head_size
    return (width, projected), (width, width), (width, 2 * inner), (inner, width)


class ModelStep:
    """A step of a backend, and around write and attention of each layer the others of its kernels.

    All layers have the same weights. Those of one layer of an 8B Llama fill an L2 cache several
    times, so each layer finds the code, the tables and the cache of its attention in memory.
    Mutates query, key and value of the step's problem, as the projections end there.
    """

    def __init__(self, step: Step, seed: int = 4) -> None:
        self._step, problem = step, step.problem
        generator = torch.Generator(problem.device).manual_seed(seed)

        def draw(rows: int, columns: int) -> torch.Tensor:
            size = (rows, columns)
            return torch.randn(
                size, generator=generator, device=problem.device, dtype=problem.dtype
            )

        self._project, self._output, self._gate_up, self._down = (
            draw(rows, columns).mul_(rows**-0.5)  # products are as large as what goes in
            for rows, columns in weight_sizes(problem.shape)
        )
        width = self._project.shape[0]
        self._norm = torch.ones(width, device=problem.device, dtype=problem.dtype)
        self._hidden = draw(problem.shape.tokens, width)

    def attended(self) -> torch.Tensor:
        """The whole step. Returns what its last layer does, [T, width]."""
        self._step.begin()
        return self._layers(attend=True)

    def bare(self) -> torch.Tensor:
        """The same without schedule, write and attention; queries stand for what attends."""
        return self._layers(attend=False)

    def _layers(self, attend: bool) -> torch.Tensor:
        hidden = self._hidden
        for index in range(self._step.problem.shape.layers):
            self._fill(self._normed(hidden) @ self._project)
            if attend:
                self._step.layer(index)
            result = self._step.out if attend else self._step.problem.query
            hidden = hidden + result.flatten(1) @ self._output
            gate, up = (self._normed(hidden) @ self._gate_up).chunk(2, -1)
            hidden = hidden + (silu(gate) * up) @ self._down
        return hidden

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self._norm.shape, self._norm)

    def _fill(self, projected: torch.Tensor) -> None:
        """A copy to where the step reads, in place of the rotation of queries and keys."""
        problem = self._step.problem
        targets = (problem.query, problem.key, problem.value)
        parts = projected.split([target[0].numel() for target in targets], -1)
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.unflatten(1, target.shape[1:]))
