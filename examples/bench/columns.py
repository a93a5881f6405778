"""Ours: contiguous columns and a kernel of this project, by the name it is registered under."""

import torch

from ..attention_backend import AttentionKernel, StepBounds
from ..kv_manager import StepTables, kernel_class
from .backend import Backend, Step
from .problem import Problem

__all__ = ["Columns"]


class Columns(Backend):
    name = "ours"

    def __init__(self, kernel: str = "triton") -> None:
        self._kernel = kernel_class(kernel)
        self.title = f"kernel {kernel!r} of vllm_kv_columns on contiguous columns"

    def obstacle(self, device: torch.device) -> str | None:
        if device.type not in self._kernel.device_types:
            return f"the kernel runs on {', '.join(self._kernel.device_types)}, not {device.type}"
        return None

    def step(self, problem: Problem) -> Step:
        return ColumnStep(problem, self._kernel())


class ColumnStep(Step):
    """Cache [column][row][layer][K, V][head][dim]; sequence i is in column i + 1."""

    def __init__(self, problem: Problem, kernel: AttentionKernel) -> None:
        super().__init__(problem)
        shape, self._kernel = problem.shape, kernel
        columns = len(shape.lengths) + 1
        sizes = (columns, shape.rows, shape.layers, 2, shape.heads, shape.head_size)
        region = problem.pool[: shape.column_elements].view(sizes)
        self._views = [
            region[:, :, layer].transpose(0, 1).unbind(2) for layer in range(shape.layers)
        ]
        info = [
            (start, q_len, i + 1, kv_end)
            for i, (start, (q_len, kv_end)) in enumerate(
                zip(problem.q_starts, shape.lengths, strict=False)
            )
        ]
        self._tables = StepTables(
            seq_info=problem.numbers(info),
            seq_cols=(problem.segments + 1).int(),
            positions=problem.positions.int(),
        )
        bounds = StepBounds(*shape.reserved, shape.query_heads, shape.heads, shape.head_size)
        kernel.reserve(bounds, problem.device)

    def begin(self) -> None:
        shape = self.problem.shape
        self._step = self._kernel.prepare(
            self._tables,
            rows=shape.rows,
            window=shape.window,
            causal=True,
            max_q_len=max(q_len for q_len, _ in shape.lengths),
        )

    def layer(self, index: int) -> None:
        problem, (key_cache, value_cache) = self.problem, self._views[index]
        self._kernel.write(problem.key, problem.value, key_cache, value_cache, self._step)
        self._kernel.attend(
            problem.query, key_cache, value_cache, self._step, scale=problem.scale, out=self.out
        )

    def cached(
        self, layer: int, segment: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = positions % self.problem.shape.rows
        key_cache, value_cache = self._views[layer]
        return key_cache[rows, segment + 1], value_cache[rows, segment + 1]
