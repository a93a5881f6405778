"""The check before a figure: it agrees with the reference, and a wrong op does not pass."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.bench.tiny import CPU, TINY, Spoiled, problem
from vllm_kv_columns.attention_backend import sdpa_varlen_reference
from vllm_kv_columns.bench import kernels
from vllm_kv_columns.bench.backend import Step
from vllm_kv_columns.bench.columns import Columns, ColumnStep
from vllm_kv_columns.bench.oracle import WrongResult, check, reference
from vllm_kv_columns.bench.shapes import Shape
from vllm_kv_columns.bench.timing import Time


@pytest.mark.parametrize("one", TINY, ids=lambda one: one.name)
def test_the_cpu_kernel_passes(one: Shape) -> None:
    assert 0 < check(Columns("torch-sdpa").step(problem(one))) < 1e-2


@pytest.mark.parametrize("one", TINY, ids=lambda one: one.name)
def test_the_oracle_computes_what_the_reference_computes(one: Shape) -> None:
    step = Columns("torch-sdpa").step(problem(one))
    assert isinstance(step, ColumnStep)
    step.begin()
    step.layer(1)
    key_cache, value_cache = step._views[1]
    expected = sdpa_varlen_reference(
        step.problem.query.float(),
        key_cache.float(),
        value_cache.float(),
        step._tables.seq_info,
        scale=step.problem.scale,
        window=one.window,
    )
    for segment, (q_len, _) in enumerate(one.lengths):
        start = step.problem.q_starts[segment]
        rows = list(range(start, start + q_len))
        found = reference(step, 1, segment, rows)
        torch.testing.assert_close(found, expected[rows].double(), atol=1e-5, rtol=1e-5)


def leave_a_row(step: Step, index: int) -> None:
    step.out[-1] = math.nan


def spoil_one_head_of_the_last_layer(step: Step, index: int) -> None:
    if index == step.problem.shape.layers - 1:
        step.out[0, 1] *= 1.05


def attend_one_key_less(step: Step, index: int) -> None:
    """Of the longest sequence, as with an off-by-one length."""
    at = max(range(len(step.problem.shape.lengths)), key=lambda i: step.problem.shape.lengths[i][1])
    row = step.problem.q_starts[at]
    assert isinstance(step, ColumnStep)
    info = step._tables.seq_info[at : at + 1].clone()
    info[0, 0], info[0, 1], info[0, 3] = 0, 1, step.problem.positions[row]
    query, (key_cache, value_cache) = step.problem.query[row : row + 1], step._views[index]
    step.out[row] = sdpa_varlen_reference(
        query, key_cache, value_cache, info, scale=step.problem.scale
    )[0]


def lose_what_was_written(step: Step, index: int) -> None:
    assert isinstance(step, ColumnStep)
    for cache in step._views[index]:
        cache[step.problem.positions[0] % step.problem.shape.rows, 1] = 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (leave_a_row, "1 of 3 rows unwritten or NaN"),
        (spoil_one_head_of_the_last_layer, r"relative error 0\.05.*layer 2, row 0"),
        (attend_one_key_less, "relative error"),
        (lose_what_was_written, "the cache lacks keys of the step"),
    ],
    ids=["unwritten", "one-head", "one-key-less", "not-in-the-cache"],
)
def test_a_wrong_op_is_refused_and_not_timed(
    spoil: Callable[[Step, int], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def time_step(step: Step, seconds: float) -> Time:
        timed.append(step)
        return Time(1.0, 0.0)

    monkeypatch.setattr(kernels, "time_step", time_step)
    backend = Spoiled(spoil)
    with pytest.raises(WrongResult, match=message):
        check(backend.step(problem(TINY[0])))
    (result,) = kernels.run(TINY[:1], [backend], CPU, seconds=0.01)
    figure = result.figures["ours"]
    assert figure.wrong
    assert figure.us is None
    assert figure.failure is not None
    assert figure.failure.startswith("not timed: ")
    assert timed == []
    kernels.run(TINY[:1], [Spoiled(lambda step, index: None)], CPU, seconds=0.01)
    assert len(timed) == 1
