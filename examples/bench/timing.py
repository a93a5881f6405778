"""Microseconds of a layer, from one captured CUDA graph of a whole step."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .backend import Step

__all__ = ["Time", "repeat", "time_step"]

FEWEST, MOST = 5, 200  # runs of which the median counts


@dataclass(frozen=True)
class Time:
    """us: median of a layer. spread: from the first to the third quartile, as a part of it."""

    us: float
    spread: float


def time_step(step: Step, seconds: float) -> Time:
    """Replay the step for so many seconds. It must have run before, as kernels compile then.

    On the CPU, for the tests of this package, the step is called and the clock is Python's.
    """
    layers = step.problem.shape.layers

    def whole() -> None:
        step.begin()
        for index in range(layers):
            step.layer(index)

    if step.problem.device.type != "cuda":
        return _summary(repeat(whole, seconds, step.problem.device), layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole()
    return _summary(repeat(graph.replay, seconds, step.problem.device), layers)


def repeat(call: Callable[[], object], seconds: float, device: torch.device) -> list[float]:
    """Seconds of each run, after two to warm up; by CUDA events where there is a device."""
    for _ in range(2):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST or (time.perf_counter() < end and len(times) < MOST):
        times.append(_once(call, device))
    return times


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def _summary(times: list[float], layers: int) -> Time:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Time(us=middle / layers * 1e6, spread=(high - low) / middle)
