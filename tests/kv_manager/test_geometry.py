"""Sizes, strides and page arithmetic, against counting by hand."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kv_columns.kv_manager import CacheGeometry, ConfigError, RegionGeometry, RingPolicy

from .builders import PAGE, config, flat_group, ring_group


@st.composite
def regions(draw: st.DrawFn) -> RegionGeometry:
    return RegionGeometry(
        name="r",
        layers=("a", "b", "c")[: draw(st.integers(1, 3))],
        policy=RingPolicy(5),
        rows=draw(st.integers(1, 40)),
        cols=3,
        num_kv_heads=draw(st.sampled_from([1, 3, 8])),
        head_size=draw(st.sampled_from([1, 20, 63, 256])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        page_size=PAGE,
        growth_rows=draw(st.sampled_from([1, 4])),
    )


def pages_of_slot(region: RegionGeometry, slot: int) -> set[int]:
    """Pages of every byte of a row, byte by byte at both ends of each page."""
    first, last = slot * region.row_bytes, (slot + 1) * region.row_bytes - 1
    return {first // PAGE, last // PAGE, *range(first // PAGE, last // PAGE)}


def test_one_token_of_all_layers_is_contiguous_and_columns_are_whole_pages() -> None:
    region = CacheGeometry.of(config(flat_group())).regions[0]
    assert region.itemsize == 4
    assert region.row_bytes == 2 * 2 * 3 * 20 * 4 == 960
    assert region.col_bytes == 10 * PAGE  # 41 rows are 39360 bytes
    assert region.nbytes == 5 * region.col_bytes
    assert region.shape == (41, 5, 2, 3, 20)
    assert region.strides == (240, 10 * PAGE // 4, 60, 20, 1)
    assert [region.layer_offset(layer) for layer in region.layers] == [0, 120]


@pytest.mark.parametrize(
    ("n", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (40, 10), (41, 10), (999, 10)]
)
def test_pages_of_a_flat_sequence_follow_its_rows(n: int, pages: int) -> None:
    assert CacheGeometry.of(config(flat_group())).pages_for(n) == pages


def test_pages_of_a_ring_stop_growing_with_its_rows() -> None:
    region = CacheGeometry.of(config(ring_group(5))).regions[0]
    assert [region.pages_for(n) for n in (0, 1, 7, 8, 9, 41)] == [0, 1, 5, 5, 5, 5]


def test_rings_have_whole_tiles_and_flat_columns_only_their_rows() -> None:
    made = CacheGeometry.of(config(flat_group(), ring_group(5), ring_tile=16))
    assert [region.rows for region in made.regions] == [41, 16]
    ring = made.regions[1]
    assert ring.policy.floor(16, ring.rows) == 0 and ring.policy.floor(17, ring.rows) == 5


def test_growth_rows_round_the_backed_rows_up() -> None:
    region = CacheGeometry.of(config(flat_group(), growth_rows=16)).regions[0]
    assert [region.pages_for(n) for n in (0, 1, 16, 17, 33)] == [0, 4, 4, 8, 10]


def test_a_group_is_split_into_regions_of_so_many_layers() -> None:
    layers = tuple("abcde")
    geometry = CacheGeometry.of(config(flat_group(layers=layers, layers_per_region=2)))
    assert [region.layers for region in geometry.regions] == [("a", "b"), ("c", "d"), ("e",)]
    assert [region.name for region in geometry.regions] == ["flat.0", "flat.1", "flat.2"]
    assert geometry.layers == layers
    assert geometry.region_of("d").layer_offset("d") == 120


def test_totals_are_sums_and_the_floor_is_the_strictest() -> None:
    geometry = CacheGeometry.of(config())
    assert geometry.cols == 5
    assert geometry.max_segments == 8
    assert geometry.scratch_pages == geometry.pages_for(1) == 3
    assert geometry.pages_for(41) == 10 + 5 + 9
    assert geometry.floor(8) == 0
    assert geometry.floor(9) == 9 - (8 - 5 + 1)
    assert geometry.floor(41) == 37


def test_high_water_mark_follows_a_rewind_until_a_ring_wraps() -> None:
    geometry = CacheGeometry.of(config())
    assert geometry.high_after_rewind(8, 3) == 3
    assert geometry.high_after_rewind(9, 6) == 9


def test_scheduler_and_worker_get_equal_geometry_through_a_pickle() -> None:
    geometry = CacheGeometry.of(config())
    assert geometry.scratch_pages == 3  # a cached value must not break equality
    copy = pickle.loads(pickle.dumps(geometry))
    assert copy == geometry
    assert copy.pages_for(41) == geometry.pages_for(41)


def test_a_budget_below_scratch_and_one_token_is_refused_with_the_need() -> None:
    CacheGeometry.of(config(budget_bytes=6 * PAGE))
    with pytest.raises(ConfigError, match=r"that is 5 pages of 4096; .* need 6 pages, 24576 bytes"):
        CacheGeometry.of(config(budget_bytes=6 * PAGE - 1))


def test_an_unknown_layer_is_refused_with_some_known_ones() -> None:
    geometry = CacheGeometry.of(config(flat_group(layers=tuple("abcdef"))))
    with pytest.raises(ConfigError, match=r"layer 'z' .* its 6 layers are: a, b, c, d, \.\.\.$"):
        geometry.region_of("z")


@given(region=regions(), start=st.integers(0, 90), count=st.integers(0, 45))
def test_slot_runs_are_the_slots_of_the_positions(
    region: RegionGeometry, start: int, count: int
) -> None:
    runs = region.slot_runs(start, start + count)
    slots = [slot for first, last in runs for slot in range(first, last)]
    assert sorted(slots) == sorted({p % region.rows for p in range(start, start + count)})
    assert all(first < last for first, last in runs)
    assert len(runs) <= 2


@given(region=regions(), start=st.integers(0, 90), count=st.integers(0, 45))
def test_written_pages_are_those_with_a_byte_of_a_written_row(
    region: RegionGeometry, start: int, count: int
) -> None:
    expected: set[int] = set()
    for position in range(start, start + count):
        expected |= pages_of_slot(region, position % region.rows)
    assert region.written_pages(start, start + count) == sorted(expected)


@given(region=regions(), end=st.integers(1, 90))
def test_end_within_page_goes_as_far_as_the_pages_of_the_last_row_allow(
    region: RegionGeometry, end: int
) -> None:
    slot = (end - 1) % region.rows
    allowed = range(max(pages_of_slot(region, slot)) + 1)
    found = region.end_within_page(end)
    assert found >= end
    for position in range(end, found):
        assert pages_of_slot(region, position % region.rows) <= set(allowed)
    last = slot + found - end
    if last + 1 < region.rows:
        assert not pages_of_slot(region, last + 1) <= set(allowed)


@given(region=regions(), n=st.integers(0, 60))
def test_pages_for_is_the_least_that_holds_the_rows(region: RegionGeometry, n: int) -> None:
    pages = region.pages_for(n)
    assert region.rows_within(pages) >= min(n, region.rows)
    if region.growth_rows == 1 and pages:
        assert region.rows_within(pages - 1) < min(n, region.rows)


def test_rows_ahead_of_need_are_counted_with_the_column_and_not_with_scratch() -> None:
    plain = CacheGeometry.of(config())
    ahead = CacheGeometry.of(config(ahead_rows=3))
    assert ahead.pages_for(0) == 0
    assert [ahead.pages_for(n) for n in range(1, 39)] == [plain.pages_for(n) for n in range(4, 42)]
    assert ahead.pages_for(39) == ahead.pages_for(41) == plain.pages_for(41)
    assert ahead.scratch_pages == plain.scratch_pages


def test_tokens_within_is_the_inverse_of_pages_for() -> None:
    for changes in ({}, {"ahead_rows": 3}, {"ahead_rows": 2, "growth_rows": 5}):
        geometry = CacheGeometry.of(config(**changes))
        for region in geometry.regions:
            for pages in range(region.pages_per_column):
                most = region.tokens_within(pages)
                assert most is not None
                assert region.pages_for(most) <= pages < region.pages_for(most + 1)
            assert region.tokens_within(region.pages_per_column) is None
