"""The measurement of the cost model's constants."""

import math
from dataclasses import astuple

import pytest
import torch

from vllm_kv_columns.attention_backend.cpu import calibrate


def test_the_fit_recovers_the_constants_that_made_the_samples() -> None:
    constants = (25.0, 35.0, 1.5, 0.0004)
    terms = [(1.0, 0.0, h, h * n) for h in (1, 4) for n in (100.0, 5000.0)]
    terms += [(0.0, 1.0, 8 * h, 8 * h * n) for h in (1, 4) for n in (100.0, 5000.0)]
    took = [sum(x * c for x, c in zip(row, constants, strict=True)) for row in terms]
    assert calibrate._fit(list(zip(terms, took, strict=True))) == pytest.approx(constants)


def test_a_measurement_gives_finite_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"LAYERS": 1, "COLS": 3, "ROWS": 40, "LENGTHS": (8, 30), "SHAPES": ((1, 32), (2, 64))}
    for name, value in small.items():
        monkeypatch.setattr(calibrate, name, value)
    costs = astuple(calibrate.measure(torch.float32))
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs)
    assert max(costs) > 1
