"""Microseconds of a layer, from captured CUDA graphs of a whole step."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .backend import Step
from .model_step import ModelStep

__all__ = ["Time", "repeat", "time_difference", "time_step"]

FEWEST, MOST = 5, 200  # runs of which the median counts


@dataclass(frozen=True)
class Time:
    """us: median of a layer. spread: from the first to the third quartile, as a part of it."""

    us: float
    spread: float


def time_step(step: Step, seconds: float) -> Time:
    """Replay the step for so many seconds. It must have run before, as kernels compile then.

    Of a step of kind "step" it is what it adds to the other kernels of a model's layers; their
    projections overwrite query, key and value of its problem. On the CPU, for the tests of this
    package, the step is called and the clock is Python's.
    """
    device, layers = step.problem.device, step.problem.shape.layers
    if step.problem.shape.kind == "step":
        model = ModelStep(step)
        return time_difference(model.attended, model.bare, layers, seconds, device)

    def whole() -> None:
        step.begin()
        for index in range(layers):
            step.layer(index)

    return _summary(repeat(_captured(whole, device), seconds, device), layers)


def time_difference(
    more: Callable[[], object],
    less: Callable[[], object],
    layers: int,
    seconds: float,
    device: torch.device,
) -> Time:
    """What a layer of ``more`` takes beyond one of ``less``: differences of neighbouring replays.

    Raises RuntimeError if it takes nothing.
    """
    for call in (more, less):
        call()  # what libraries set up for a shape cannot be captured
    rounds = _rounds([_captured(call, device) for call in (more, less)], seconds, device)
    differences = [longer - shorter for longer, shorter in rounds]
    if statistics.median(differences) <= 0:
        raise RuntimeError("the step took no longer than without what is timed: try more --seconds")
    return _summary(differences, layers)


def _captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What replays the call's CUDA graph; the call itself where there is no device."""
    if device.type != "cuda":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def repeat(call: Callable[[], object], seconds: float, device: torch.device) -> list[float]:
    """Seconds of each run, after two to warm up; by CUDA events where there is a device."""
    return [took for (took,) in _rounds([call], seconds, device)]


def _rounds(
    calls: Sequence[Callable[[], object]], seconds: float, device: torch.device
) -> list[list[float]]:
    """Seconds of each call in each round, after two rounds to warm up."""
    for _ in range(2):
        for call in calls:
            call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < FEWEST or (time.perf_counter() < end and len(rounds) < MOST):
        rounds.append(_round(calls, device))
    return rounds


def _round(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return [_once(call) for call in calls]
    if len(calls) > 1:
        calls[-1]()  # keeps the device busy while the host launches the first, as that does later
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _summary(times: list[float], layers: int) -> Time:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Time(us=middle / layers * 1e6, spread=(high - low) / middle)
