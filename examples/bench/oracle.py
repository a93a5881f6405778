"""What a step must leave behind, in float64, for some of its query rows."""

import math

import torch

from .backend import Step

__all__ = ["BOUND", "SAMPLES", "WrongResult", "check"]

SAMPLES = 64  # query rows that are checked, each with all its heads
BOUND = 1e-2  # largest relative error that bfloat16 allows, of any head of any row
WEIGHTS_AT_ONCE = 1 << 25  # weights that the oracle holds


class WrongResult(Exception):
    """What a step left is not attention. The message says where; ``error`` is the largest seen."""

    def __init__(self, message: str, error: float = math.nan) -> None:
        super().__init__(message)
        self.error = error


def check(step: Step, bound: float = BOUND, samples: int = SAMPLES) -> float:
    """Run a step's first and last layer and compare with the oracle.

    Returns the largest relative error ||out - ref|| / ||ref|| of any head of a sampled row. Raises
    WrongResult if it is above the bound, if any row of the output was left unwritten or is not a
    number, or if the cache does not hold the keys and values of a sampled row's token.
    """
    problem, last = step.problem, step.problem.shape.layers - 1
    generator = torch.Generator().manual_seed(3)
    tokens = problem.shape.tokens
    worst = 0.0
    step.begin()
    for layer in range(last + 1):
        if layer not in (0, last):
            step.layer(layer)  # in their order: a backend may count on it
            continue
        step.out.fill_(math.nan)
        step.layer(layer)
        bad = step.out.isnan().flatten(1).any(1).sum().item()
        if bad:
            raise WrongResult(f"{bad} of {tokens} rows unwritten or NaN (layer {layer})")
        drawn = torch.randperm(tokens, generator=generator)[: max(1, samples // 2 - 2)].tolist()
        rows = sorted({0, tokens - 1, *drawn})
        for segment, chosen in _by_segment(step, rows).items():
            worst = max(worst, _check_segment(step, layer, segment, chosen, bound))
    return worst


def _by_segment(step: Step, rows: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, segment in zip(rows, step.problem.segments[rows].tolist(), strict=True):
        found.setdefault(segment, []).append(row)
    return found


def _check_segment(step: Step, layer: int, segment: int, rows: list[int], bound: float) -> float:
    problem = step.problem
    positions = problem.positions[rows]
    for name, ours, given in zip(
        ("keys", "values"),
        step.cached(layer, segment, positions),
        (problem.key[rows], problem.value[rows]),
        strict=True,
    ):
        if not torch.equal(ours, given):
            raise WrongResult(f"the cache lacks {name} of the step (layer {layer}, row {rows[0]})")
    found = step.out[rows].double()
    expected = reference(step, layer, segment, rows)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    error, at = float(errors.max()), rows[int(errors.amax(1).argmax())]
    if not error <= bound:
        message = f"relative error {error:.2g}, above {bound:g} (layer {layer}, row {at})"
        raise WrongResult(message, error)
    return error


def reference(step: Step, layer: int, segment: int, rows: list[int]) -> torch.Tensor:
    """softmax(scale * q k^T) v of query rows of one sequence, float64 [n, Hq, D].

    Keys and values of the step's own tokens come from the problem, older ones from the cache.
    """
    problem, shape = step.problem, step.problem.shape
    q_len, kv_end = shape.lengths[segment]
    first = shape.first_key(segment)
    old = torch.arange(first, kv_end - q_len, device=problem.device)
    new = slice(problem.q_starts[segment], problem.q_starts[segment] + q_len)
    keys, values = (
        torch.cat([cached, given[new]]).double()
        for cached, given in zip(
            step.cached(layer, segment, old), (problem.key, problem.value), strict=True
        )
    )
    at = torch.arange(first, kv_end, device=problem.device)
    results = []
    at_once = max(1, WEIGHTS_AT_ONCE // (len(at) * shape.query_heads))
    for some in torch.tensor(rows, device=problem.device).split(at_once):
        heads = problem.query[some].double().unflatten(1, (shape.heads, shape.group))
        scores = torch.einsum("thgd,khd->hgtk", heads, keys) * problem.scale
        position = problem.positions[some, None]
        hidden = at > position
        if shape.window is not None:
            hidden |= at <= position - shape.window
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        results.append(torch.einsum("hgtk,khd->thgd", weights, values).flatten(1, 2))
    return torch.cat(results)
