"""Steps that are timed as in a model: what runs around them, and what of it is counted."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.bench.tiny import CPU, problem, shape
from vllm_kv_columns.attention_backend import StepBounds
from vllm_kv_columns.attention_backend.cpu import CpuKernel
from vllm_kv_columns.bench import timing
from vllm_kv_columns.bench.backend import Step
from vllm_kv_columns.bench.columns import Columns
from vllm_kv_columns.bench.model_step import ModelStep, weight_sizes
from vllm_kv_columns.bench.oracle import reference
from vllm_kv_columns.bench.shapes import SHAPES, Shape

IN_MODEL = shape("in-model", "step", (1, 40), (1, 7), (1, 33))
ALONE = shape("alone", "decode", (1, 40), (1, 7), (1, 33))


def laid_out(of: Shape) -> Step:
    return Columns("torch-sdpa").step(problem(of))


def recorded(step: Step) -> list[str]:
    """What is asked of the step from now on."""
    calls: list[str] = []
    begin, layer = step.begin, step.layer

    def on_begin() -> None:
        calls.append("begin")
        begin()

    def on_layer(index: int) -> None:
        calls.append(f"layer {index}")
        layer(index)

    step.begin, step.layer = on_begin, on_layer  # type: ignore[method-assign]
    return calls


def test_weights_are_those_of_an_8b_llama() -> None:
    for one in SHAPES:
        if one.kind == "step":
            assert weight_sizes(one) == ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def test_a_step_in_a_model_is_begun_once_and_has_each_layer_once_and_bare_it_has_nothing() -> None:
    step = laid_out(IN_MODEL)
    calls = recorded(step)
    model = ModelStep(step)
    model.attended()
    assert calls == ["begin", "layer 0", "layer 1", "layer 2"]
    model.bare()
    assert len(calls) == 4


def test_a_layer_is_a_llamas() -> None:
    """Against the same written out; attention is the oracle's, of the model's own q, k and v."""
    one = shape("in-model", "step", (1, 40), (1, 7), (1, 33))
    step = laid_out(Shape(one.name, one.kind, one.lengths, 2, group=2, head_size=16, layers=1))
    model = ModelStep(step)
    project, output, gate_up, down = (
        weight.double() for weight in (model._project, model._output, model._gate_up, model._down)
    )
    hidden = model._hidden.double()
    found = model.attended().double()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.bfloat16).eps).sqrt()

    query, key, value = (norm(hidden) @ project).split([64, 32, 32], -1)
    for ours, expected in zip(
        (step.problem.query, step.problem.key, step.problem.value), (query, key, value), strict=True
    ):
        torch.testing.assert_close(ours.flatten(1).double(), expected, atol=0.05, rtol=0.05)
    attended = torch.cat([reference(step, 0, segment, [segment]) for segment in range(3)])
    hidden = hidden + attended.flatten(1) @ output
    gate, up = (norm(hidden) @ gate_up).chunk(2, -1)
    expected = hidden + (gate * gate.sigmoid() * up) @ down
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    assert (model.bare() - found).norm() > 0.1 * found.norm()


def test_what_a_layer_attends_reaches_the_next_one() -> None:
    step = laid_out(IN_MODEL)
    model = ModelStep(step)
    attended = model.attended()
    assert attended.isfinite().all()
    before = step.problem.query.clone()

    def attend_nothing(index: int) -> None:
        step.out.zero_()

    step.layer = attend_nothing  # type: ignore[method-assign]
    model.attended()
    assert not torch.equal(step.problem.query, before)


def test_buffers_are_made_for_an_engines_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[StepBounds] = []
    monkeypatch.setattr(CpuKernel, "reserve", lambda self, to, device: bounds.append(to))
    laid_out(IN_MODEL)
    laid_out(ALONE)
    assert bounds == [StepBounds(8192, 256, 4, 2, 16), StepBounds(3, 3, 4, 2, 16)]


class Clock:
    """Seconds that pass only where a call says so, for the host's clock and the device's events."""

    def __init__(self) -> None:
        self.now = 0.0

    def takes(self, *seconds: float) -> Callable[[], object]:
        """A call that takes so long, one after the other of these, again and again."""
        calls = 0

        def call() -> None:
            nonlocal calls
            self.now += seconds[calls % len(seconds)]
            calls += 1

        return call

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    """A CUDA event of such a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._at = clock, -1.0

    def record(self) -> None:
        self._at = self._clock.now

    def synchronize(self) -> None:
        assert self._at >= 0

    def elapsed_time(self, end: "Event") -> float:
        return (end._at - self._at) * 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: one.now)
    monkeypatch.setattr(torch.cuda, "Event", one.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return one


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_layer_takes_what_a_replay_takes_beyond_its_neighbour(
    device: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_captured", lambda call, device: call)
    # One in five replays is disturbed.
    more, less = clock.takes(1.5, 1.5, 1.5, 9.5, 1.5), clock.takes(1.0)
    found = timing.time_difference(more, less, 4, 200.0, torch.device(device))
    assert found.us == pytest.approx(0.5 / 4 * 1e6)
    assert found.spread == pytest.approx(0)


def test_a_step_that_takes_nothing_is_not_a_figure(clock: Clock) -> None:
    with pytest.raises(RuntimeError, match="took no longer than without what is timed"):
        timing.time_difference(clock.takes(1.0), clock.takes(1.0), 4, 20.0, CPU)


def test_on_a_device_both_are_captured_and_their_graphs_take_turns(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Graph:
        made = 0

        def __init__(self) -> None:
            Graph.made += 1
            self._number = Graph.made

        def replay(self) -> None:
            log.append(f"replay {self._number}")
            clock.now += {1: 3.0, 2: 1.0}[self._number]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    found = timing.time_difference(
        lambda: log.append("more"), lambda: log.append("less"), 2, 1.0, torch.device("cuda")
    )
    assert found.us == pytest.approx(1e6)
    # Run before they are captured, in a graph each, warmed up; then a replay in front of each pair.
    assert log[:8] == ["more", "less", "more", "less", *["replay 1", "replay 2"] * 2]
    assert log[8:11] == ["replay 2", "replay 1", "replay 2"]


def test_only_steps_of_their_kind_are_timed_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def time_difference(more: Any, less: Any, layers: int, *_: object) -> timing.Time:
        asked.append((more.__name__, less.__name__))
        return timing.Time(us=7.0, spread=0.0)

    monkeypatch.setattr(timing, "time_difference", time_difference)
    assert timing.time_step(laid_out(IN_MODEL), 0.01).us == 7.0
    assert timing.time_step(laid_out(ALONE), 0.01).us != 7.0
    assert asked == [("attended", "bare")]
