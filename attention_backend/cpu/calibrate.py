"""Measure the constants of ``CostModel`` on this machine and print them.

python -m vllm_kv_columns.attention_backend.cpu.calibrate [dtype]
"""

import sys
import time

import torch

from ...kv_manager.tables import StepTables
from .attention import CpuKernel
from .schedule import CostModel

__all__ = ["measure"]

LAYERS, COLS, ROWS, GROUP = 8, 8, 1024, 3
LENGTHS = (8, 64, 192, 700)
SHAPES = ((1, 64), (3, 64), (4, 128))  # KV heads, head size
BATCHED = CostModel(segment_call=1e9)
ONE_BY_ONE = CostModel(batch_call=1e9)


def measure(dtype: torch.dtype) -> CostModel:
    """Constants fitted to decode steps of one layer, batched and one by one."""
    samples: list[tuple[tuple[float, ...], float]] = []
    copied: list[float] = []
    for heads, size in SHAPES:
        # Columns of all layers, token by token, as the stores lay them out.
        region = torch.zeros(COLS, ROWS, LAYERS, 2, heads, size, dtype=dtype)
        layers = [region[:, :, layer].transpose(0, 1) for layer in range(LAYERS)]
        for length in LENGTHS:
            numbers = length * heads * size
            one_by_one = _time(layers, COLS, length, ONE_BY_ONE) / COLS
            samples.append(((1.0, 0.0, heads, numbers), one_by_one))
            for cols in (2, COLS):
                batched = _time(layers, cols, length, BATCHED)
                samples.append(((0.0, 1.0, cols * heads, cols * numbers), batched))
            if length > 8:
                # Half of the window lies before the last row of a ring, half after it.
                wrapped = _time(layers, COLS, length, ONE_BY_ONE, ROWS + length // 2) / COLS
                copied.append((wrapped - one_by_one) / numbers)
    segment_call, batch_call, head, element = _fit(samples)
    return CostModel(
        segment_call=segment_call,
        batch_call=batch_call,
        head=head,
        element=element,
        copied_element=max(0.0, sorted(copied)[len(copied) // 2]),
    )


def _time(
    layers: list[torch.Tensor],
    cols: int,
    length: int,
    cost: CostModel,
    kv_end: int | None = None,
) -> float:
    """Microseconds of a layer that decodes ``cols`` sequences: the least of several passes."""
    info = [(i, 1, i, kv_end or length) for i in range(cols)]
    none = torch.empty(0, dtype=torch.int32)
    tables = StepTables(torch.tensor(info, dtype=torch.int32), none, none)
    kernel = CpuKernel(cost)
    step = kernel.prepare(tables, rows=ROWS, window=length if kv_end else None, causal=True)
    heads, size = layers[0].shape[3:]
    query = torch.zeros(cols, heads * GROUP, size, dtype=layers[0].dtype)
    out = torch.empty_like(query)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        for layer in layers:
            kernel.attend(query, layer[:, :, 0], layer[:, :, 1], step, scale=1.0, out=out)
        best = min(best, (time.perf_counter() - start) / len(layers) * 1e6)
    return best


def _fit(samples: list[tuple[tuple[float, ...], float]]) -> list[float]:
    """Least squares on relative errors; a constant that comes out negative is zero."""
    terms = torch.tensor([[x / took for x in row] for row, took in samples], dtype=torch.float64)
    ones = torch.ones(len(samples), 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(terms, ones).solution
    return [max(0.0, float(x)) for x in solution.flatten()]


if __name__ == "__main__":
    with torch.inference_mode():
        print(measure(getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "bfloat16")))
