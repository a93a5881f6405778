"""The reference against an independent dense formula, and what it promises besides."""

import pytest
import torch
from hypothesis import given, settings

from vllm_kv_columns.attention_backend import sdpa_varlen_reference, write_slots_reference

from .cases import Case, build, cases, empty_cache, first_key, tolerance
from .dense import dense_attention


@settings(deadline=None, max_examples=60)
@given(cases(max_segments=4, max_q_len=9))
def test_equals_dense_attention_on_gathered_keys(case: Case) -> None:
    made = build(case)
    out = sdpa_varlen_reference(
        made.query,
        made.key_cache,
        made.value_cache,
        made.seq_info,
        scale=made.scale,
        causal=case.causal,
        window=case.window,
    )
    expected = torch.zeros(made.query.shape, dtype=torch.float64)
    for segment in case.segments:
        q_start, q_len, col, kv_end = segment
        if q_len == 0 or kv_end == 0:
            continue
        slots = torch.arange(first_key(segment, case.window), kv_end) % case.rows
        expected[q_start : q_start + q_len] = dense_attention(
            made.query[q_start : q_start + q_len],
            made.key_cache[slots, col],
            made.value_cache[slots, col],
            scale=made.scale,
            causal=case.causal,
            window=case.window,
        )
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance(made))


def test_one_key_returns_its_value() -> None:
    made = build(Case(segments=((0, 1, 1, 5),), tokens=1, rows=8, cols=2, window=1))
    out = sdpa_varlen_reference(
        made.query, made.key_cache, made.value_cache, made.seq_info, scale=made.scale, window=1
    )
    values = made.value_cache[4, 1].repeat_interleave(3, dim=0)
    torch.testing.assert_close(out[0], values, rtol=0, atol=0)


def test_queries_before_the_first_position_are_zero() -> None:
    made = build(Case(segments=((0, 5, 1, 2),), tokens=5, rows=8, cols=2))
    out = sdpa_varlen_reference(
        made.query, made.key_cache, made.value_cache, made.seq_info, scale=made.scale
    )
    assert not out[:3].any()
    assert out[3:].all()


@pytest.mark.parametrize("order", ["column", "seed"])
def test_write_puts_positions_into_their_slots_and_nothing_else(order: str) -> None:
    case = Case(segments=(), tokens=4, rows=5, cols=3, order=order)
    key_cache, value_cache = empty_cache(case)
    key, value = torch.randn(2, 3, case.heads, case.head_size)
    write_slots_reference(
        key,
        value,
        key_cache,
        value_cache,
        torch.tensor([1, 1, 2], dtype=torch.int32),
        torch.tensor([4, 5, 13], dtype=torch.int32),
    )
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        expected = torch.zeros_like(cache)
        expected[4, 1], expected[0, 1], expected[3, 2] = tokens
        assert torch.equal(cache, expected)
