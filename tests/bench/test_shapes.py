"""The steps that are timed: which, how large, and how much work."""

import math

import pytest

from tests.bench.tiny import shape
from vllm_kv_columns.bench.model_step import weight_sizes
from vllm_kv_columns.bench.shapes import SHAPES, Shape, select

# name: sequences, query rows, longest sequence, KV heads, query heads of each, head size, window
EXPECTED = {
    "decode-64x4k": (64, 64, 4096, 8, 4, 128, None),
    "decode-256x1k": (256, 256, 1024, 8, 4, 128, None),
    "decode-8x32k": (8, 8, 32768, 8, 4, 128, None),
    "decode-1x128k": (1, 1, 131072, 8, 4, 128, None),
    "decode-128-skewed": (128, 128, 16384, 8, 4, 128, None),
    "decode-64x32k-w1k": (64, 64, 32768, 8, 4, 128, 1024),
    "verify-64x5-at-4k": (64, 320, 4096, 8, 4, 128, None),
    "prefill-1x8k": (1, 8192, 8192, 8, 4, 128, None),
    "prefill-4x2k": (4, 8192, 2048, 8, 4, 128, None),
    "prefill-16x512": (16, 8192, 512, 8, 4, 128, None),
    "chunk-2k-at-32k": (1, 2048, 32768, 8, 4, 128, None),
    "prefill-8k-w1k": (1, 8192, 8192, 8, 4, 128, 1024),
    "prefill-8k-d64-g8": (1, 8192, 8192, 8, 8, 64, None),
    "prefill-4k-d256-h4-g2": (1, 4096, 4096, 4, 2, 256, None),
    "mixed-128x2k+2k-at-8k": (129, 2176, 8192, 8, 4, 128, None),
    "tp8-decode-64x4k": (64, 64, 4096, 1, 8, 128, None),
    "tp8-prefill-8k": (1, 8192, 8192, 1, 8, 128, None),
    "step-1x160": (1, 1, 160, 8, 4, 128, None),
    "step-1x1k": (1, 1, 1024, 8, 4, 128, None),
    "step-1x4k": (1, 1, 4096, 8, 4, 128, None),
    "step-1x16k": (1, 1, 16384, 8, 4, 128, None),
    "step-16x256": (16, 16, 256, 8, 4, 128, None),
    "step-16x2k": (16, 16, 2048, 8, 4, 128, None),
    "step-64x512": (64, 64, 512, 8, 4, 128, None),
}


def test_the_list_is_the_one_that_was_asked_for() -> None:
    found = {
        one.name: (
            len(one.lengths),
            one.tokens,
            one.max_kv,
            one.heads,
            one.group,
            one.head_size,
            one.window,
        )
        for one in SHAPES
    }
    assert found == EXPECTED


@pytest.mark.parametrize("one", SHAPES, ids=lambda one: one.name)
def test_layers_turn_over_twice_the_l2_and_fit_into_60_gb(one: Shape) -> None:
    if one.kind == "step":  # there it is the weights of one layer
        assert 2 * sum(rows * columns for rows, columns in weight_sizes(one)) > 2 * 60e6
    else:
        assert one.layers * one.kv_bytes > 2 * 60e6
    assert 2 * one.pool_elements < 60e9


def test_skewed_lengths_are_all_multiples_of_128_up_to_16k_not_sorted() -> None:
    (skewed,) = select(["skewed"])
    lengths = [kv_end for _, kv_end in skewed.lengths]
    assert sorted(lengths) == list(range(128, 16385, 128))
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("window", [None, 1, 7, 30, 500])
@pytest.mark.parametrize(
    "lengths",
    [((1, 40), (1, 7)), ((3, 41), (5, 5)), ((40, 40), (1, 1)), ((20, 63), (1, 17), (25, 50))],
    ids=["decode", "verify", "prefill", "mixed"],
)
def test_work_is_what_counting_one_by_one_gives(
    lengths: tuple[tuple[int, int], ...], window: int | None
) -> None:
    one = shape("any", "any", *lengths, window=window)
    pairs, keys = 0, set()
    for sequence, (q_len, kv_end) in enumerate(lengths):
        for query in range(kv_end - q_len, kv_end):
            for key in range(query + 1):
                if query - key < (window or math.inf):
                    pairs += 1
                    keys.add((sequence, key))
    assert one.pairs == pairs
    assert one.flop == 4 * pairs * one.heads * one.group * one.head_size
    assert one.kv_bytes == len(keys) * one.heads * one.head_size * 2 * 2  # K and V, 2 bytes each


@pytest.mark.parametrize("one", SHAPES, ids=lambda one: one.name)
def test_a_ring_has_rows_for_its_window_and_the_step(one: Shape) -> None:
    most = one.max_kv if one.window is None else one.window + one.max_query - 1
    assert min(one.max_kv, most) <= one.rows <= one.max_kv
    assert one.rows - most < 128


def test_select_takes_parts_of_names_in_the_order_of_the_list() -> None:
    assert [one.name for one in select(["tp8", "1x128k"])] == [
        "decode-1x128k",
        "tp8-decode-64x4k",
        "tp8-prefill-8k",
    ]
    assert select([]) == list(SHAPES)


def test_select_names_the_shapes_where_a_part_is_in_none() -> None:
    with pytest.raises(ValueError, match=r"'128q' .* decode-64x4k .* tp8-prefill-8k"):
        select(["tp8", "128q"])
