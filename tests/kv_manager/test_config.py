"""Policies and the checks of the configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kv_columns.kv_manager import ConfigError, FlatPolicy, LayerGroup, RingPolicy

from .builders import PAGE, config, flat_group, ring_group


def test_flat_layer_keeps_a_row_for_every_position() -> None:
    assert FlatPolicy().rows(capacity=63, max_write=7) == 63
    assert FlatPolicy().floor(high=63, rows=63) == 0


@pytest.mark.parametrize(
    ("window", "max_write", "capacity", "rows"),
    [(5, 4, 41, 8), (1, 1, 41, 1), (1, 7, 41, 7), (11, 4, 13, 13), (63, 111, 1000, 173)],
)
def test_ring_rows_are_window_plus_largest_write_minus_one(
    window: int, max_write: int, capacity: int, rows: int
) -> None:
    assert RingPolicy(window).rows(capacity, max_write) == rows


@pytest.mark.parametrize(
    ("high", "floor"),
    [(0, 0), (8, 0), (9, 5), (10, 6), (41, 37)],
    ids=["empty", "full but not wrapped", "one row lost", "two rows lost", "far on"],
)
def test_ring_floor_is_what_its_eight_rows_still_hold_for_a_window_of_five(
    high: int, floor: int
) -> None:
    assert RingPolicy(5).floor(high, rows=8) == floor


@given(
    window=st.integers(2, 9),
    max_write=st.integers(1, 6),
    moves=st.lists(st.tuples(st.integers(1, 6), st.floats(0, 1)), max_size=12),
)
def test_ring_floor_equals_a_count_over_slots_through_writes_and_rewinds(
    window: int, max_write: int, moves: list[tuple[int, float]]
) -> None:
    """Write, go back to somewhere above the floor, write again; compare with the slots."""
    policy = RingPolicy(window)
    rows = policy.rows(capacity=1000, max_write=max_write)
    slots: dict[int, int] = {}
    length = high = 0
    for count, back in moves:
        for position in range(length, length + min(count, max_write)):
            slots[position % rows] = position
        length += min(count, max_write)
        high = max(high, length)
        lost = [
            n
            for n in range(1, length + 1)
            if any(slots.get(p % rows) != p for p in range(max(0, n - window + 1), n))
        ]
        floor = policy.floor(high, rows)
        assert floor == max(lost, default=-1) + 1
        assert floor <= length
        length = floor + int(back * (length - floor))


@given(window=st.integers(1, 9), max_write=st.integers(1, 6), start=st.integers(0, 60))
def test_ring_rows_suffice_and_one_less_does_not(window: int, max_write: int, start: int) -> None:
    """After a largest write from ``start`` on, its first query still finds its whole window."""

    def window_is_there(rows: int) -> bool:
        slots = {p % rows: p for p in range(start + max_write)}
        return all(slots[p % rows] == p for p in range(max(0, start - window + 1), start + 1))

    rows = RingPolicy(window).rows(10_000, max_write)
    assert window_is_there(rows)
    if rows > 1 and start + max_write >= rows and start >= window - 1:
        assert not window_is_there(rows - 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_seqs", 0, "max_seqs is 0; it must be an integer of at least 1"),
        ("capacity", 2**31, "capacity is 2147483648; at most 2147483647"),
        ("max_write", -3, "max_write is -3"),
        ("growth_rows", 1.5, "growth_rows is 1.5; it must be an integer"),
        ("budget_bytes", -1, "budget_bytes is -1"),
        ("ring_tile", 0, "ring_tile is 0; it must be an integer of at least 1"),
        ("ahead_rows", -1, "ahead_rows is -1; it must be an integer of at least 0"),
        ("page_size", 2048, "page_size is 2048; it must be an integer of at least 4096"),
        ("page_size", 3 * PAGE, "page_size is 12288; it must be a power of two"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_limit_is_named_with_its_value(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", (), r"layers is \(\); give a tuple of layer names"),
        ("layers", "flat", "layers is 'flat'; give a tuple"),
        ("policy", "ring", "policy is 'ring'; use FlatPolicy or RingPolicy"),
        ("num_kv_heads", 0, "num_kv_heads is 0"),
        ("head_size", True, "head_size is True"),
        ("dtype", "fp8", r"dtype is 'fp8'; use one of \['bfloat16', 'float16', 'float32'\]"),
        ("layers_per_region", 0, "layers_per_region is 0"),
    ],
)
def test_a_bad_layer_group_is_named_with_its_value(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"layer group 'flat': {message}"):
        flat_group(**{field: value})


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="window is 0; it must be an integer of at least 1"):
        RingPolicy(0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((flat_group(), flat_group()), "group name 'flat' appears twice"),
        ((flat_group(), ring_group(5, layers=("flat.1",))), "layer name 'flat.1' appears twice"),
        ((flat_group(layers=("x", "x")),), "layer name 'x' appears twice"),
    ],
    ids=["group", "layer of two groups", "layer of one group"],
)
def test_names_must_be_unique(groups: tuple[LayerGroup, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*groups)


def test_a_cache_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups is empty; give at least one LayerGroup"):
        config(groups=())
