"""The run of ``kernels``: every shape on every backend, checked and then timed."""

from collections.abc import Callable, Sequence

import torch

from .backend import Backend
from .oracle import BOUND, WrongResult, check
from .problem import Problem, make_pool
from .results import Figure, ShapeResult
from .shapes import Shape
from .timing import time_step

__all__ = ["BACKENDS", "make_backend", "run", "sort_out"]

BACKENDS = ("ours", "fa3", "triton")

Report = Callable[[Shape, Backend, Figure], None]


def make_backend(name: str, kernel: str = "triton") -> Backend:
    """One of BACKENDS. kernel: of ours, by the name it is registered under."""
    from .columns import Columns
    from .flash3 import FlashAttention3
    from .unified import UnifiedAttention

    if name == "ours":
        return Columns(kernel)
    return {"fa3": FlashAttention3, "triton": UnifiedAttention}[name]()


def sort_out(
    backends: Sequence[Backend], device: torch.device
) -> tuple[list[Backend], dict[str, str]]:
    """Those that can run here, and why the others cannot, by name."""
    reasons = {backend.name: backend.obstacle(device) for backend in backends}
    found = [backend for backend in backends if reasons[backend.name] is None]
    return found, {name: reason for name, reason in reasons.items() if reason is not None}


def run(
    shapes: Sequence[Shape],
    backends: Sequence[Backend],
    device: torch.device,
    *,
    seconds: float,
    bound: float = BOUND,
    report: Report | None = None,
) -> list[ShapeResult]:
    """Measure. A backend that fails on a shape has its failure for a figure, and the run goes on.

    seconds: of replays for each figure. report is called after each figure. Raises
    torch.OutOfMemoryError if the caches of the largest shape do not fit into device memory.
    """
    pool = make_pool(shapes, device)
    results = []
    for shape in shapes:
        result = ShapeResult(shape)
        for backend in backends:
            figure = result.figures[backend.name] = _figure(backend, shape, pool, seconds, bound)
            if report is not None:
                report(shape, backend, figure)
        results.append(result)
    return results


def _figure(
    backend: Backend, shape: Shape, pool: torch.Tensor, seconds: float, bound: float
) -> Figure:
    error = None
    try:
        if pool.device.type == "cuda":
            torch.cuda.empty_cache()  # what the graph before held
        step = backend.step(Problem(shape, pool))
        error = check(step, bound)
        time = time_step(step, seconds)
    except WrongResult as wrong:
        return Figure(error=wrong.error, failure=f"not timed: {wrong}", wrong=True)
    except Exception as failure:
        lines = str(failure).strip().splitlines() or [""]
        return Figure(error=error, failure=f"{type(failure).__name__}: {lines[0][:300]}")
    return Figure(us=time.us, spread=time.spread, error=error)
