"""Mistakes that must show; if one passed for right, the other tests would prove nothing."""

from collections.abc import Callable

import pytest
import torch

from vllm_kv_columns.attention_backend import (
    sdpa_varlen,
    sdpa_varlen_reference,
    write_slots,
)

from .dense import dense_attention

WINDOW, MAX_WRITE, LENGTH, HEADS, GROUP, SIZE = 16, 8, 61, 2, 3, 32
SCALE = SIZE**-0.5


def reference(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, info: torch.Tensor
) -> torch.Tensor:
    return sdpa_varlen_reference(query, key_cache, value_cache, info, scale=SCALE, window=WINDOW)


def op(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, info: torch.Tensor
) -> torch.Tensor:
    return sdpa_varlen(query, key_cache, value_cache, info, SCALE, True, WINDOW)


def worst_error_of_chunked_prefill(
    attend: Callable[..., torch.Tensor], rows: int, read_from: tuple[int, int] = (1, 2)
) -> float:
    """Two sequences in columns 1 and 2, prefilled in chunks, against dense attention."""
    torch.manual_seed(0)
    query = torch.randn(2, LENGTH, HEADS * GROUP, SIZE)
    key, value = torch.randn(2, 2, LENGTH, HEADS, SIZE)
    key_cache, value_cache = torch.zeros(2, rows, 3, HEADS, SIZE)
    worst = 0.0
    for start in range(0, LENGTH, MAX_WRITE):
        positions = torch.arange(start, min(start + MAX_WRITE, LENGTH))
        n = len(positions)
        for i, col in enumerate((1, 2)):
            write_slots(
                key[i, positions],
                value[i, positions],
                key_cache,
                value_cache,
                torch.full((n,), col, dtype=torch.int32),
                positions.int(),
            )
        info = [(i * n, n, col, start + n) for i, col in enumerate(read_from)]
        out = attend(
            query[:, positions].flatten(0, 1),
            key_cache,
            value_cache,
            torch.tensor(info, dtype=torch.int32),
        )
        for i in (0, 1):
            expected = dense_attention(
                query[i, positions],
                key[i, : start + n],
                value[i, : start + n],
                scale=SCALE,
                window=WINDOW,
            )
            worst = max(worst, (out[i * n : i * n + n] - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("attend", [reference, op])
def test_a_ring_of_window_plus_write_rows_is_right(attend: Callable[..., torch.Tensor]) -> None:
    assert worst_error_of_chunked_prefill(attend, WINDOW + MAX_WRITE - 1) < 1e-5


@pytest.mark.parametrize("attend", [reference, op])
def test_a_ring_cut_to_the_window_is_wrong(attend: Callable[..., torch.Tensor]) -> None:
    assert worst_error_of_chunked_prefill(attend, WINDOW) > 0.1


@pytest.mark.parametrize("attend", [reference, op])
def test_a_ring_one_row_short_is_wrong(attend: Callable[..., torch.Tensor]) -> None:
    assert worst_error_of_chunked_prefill(attend, WINDOW + MAX_WRITE - 2) > 0.1


@pytest.mark.parametrize("attend", [reference, op])
def test_the_wrong_column_is_wrong(attend: Callable[..., torch.Tensor]) -> None:
    rows = WINDOW + MAX_WRITE - 1
    assert worst_error_of_chunked_prefill(attend, rows, read_from=(2, 1)) > 0.1
