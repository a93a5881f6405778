"""The store cuda-vmm over a driver that a test controls: its calls, its order, its refusals."""

import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    CudaVmmStore,
    FlatPolicy,
    LayerGroup,
    StoreError,
    StoreFullError,
)
from vllm_kv_columns.kv_manager.stores.usage import StoreUsage

from .builders import PAGE, config, holds, is_zero, write
from .fake_driver import FakeDriver


def one_group(budget_pages: int = 400, **changes: Any) -> CacheGeometry:
    """One region whose rows are a quarter of a page, so that page = 4 tokens; scratch is a page."""
    group = LayerGroup("flat", ("a",), FlatPolicy(), 2, 64, "float32")  # 1024 bytes a row
    return CacheGeometry.of(
        CacheConfig(
            **{
                "max_seqs": 6,
                "capacity": 1000,
                "max_write": 1000,
                "groups": (group,),
                "page_size": PAGE,
                "budget_bytes": budget_pages * PAGE,
                **changes,
            }
        )
    )


class QuietStore(CudaVmmStore):
    """Without the keeper's thread: tests call ``tend``."""

    def _wake_keeper(self) -> None:
        pass

    def tend(self) -> float | None:
        return self._tend()

    def live_pages(self, col: int) -> int:
        return sum(region.live_pages(col) for region in self._regions)


def made(driver: FakeDriver, geometry: CacheGeometry | None = None, **options: Any) -> QuietStore:
    return QuietStore(geometry or one_group(), driver=driver, **options)


def pages(count: int) -> int:
    """Tokens that fill so many pages."""
    return 4 * count


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver(lag=True)
    yield driver
    gc.collect()
    driver.assert_clean()


def grown(driver: FakeDriver, before: int, call: str) -> list[int]:
    """Pages of each of these calls from entry ``before`` of the log on."""
    return [nbytes // PAGE for name, nbytes in driver.log[before:] if name == call]


# --- extents and calls


def test_a_long_prompt_takes_few_calls_of_the_driver(driver: FakeDriver) -> None:
    with made(driver) as store:
        before = len(driver.log)
        store.prepare_write(1, 0, pages(149))
        assert grown(driver, before, "create") == [64, 64, 16, 4, 1]
        assert grown(driver, before, "map") == [64, 64, 16, 4, 1]
        assert grown(driver, before, "allow") == grown(driver, before, "zero") == [149]
        assert store.committed_pages == 150
        before = len(driver.log)
        store.prepare_write(1, pages(149), pages(150))
        assert grown(driver, before, "map") == grown(driver, before, "allow") == [1]


def test_usage_tells_live_from_spare_memory(driver: FakeDriver) -> None:
    with made(driver, spare_bytes=4 * PAGE) as store:
        store.prepare_write(1, 0, pages(20))
        store.clone(1, 2, pages(16))
        assert store.usage() == StoreUsage(21, 0, 4, mapped=1 + 20 + 16)
        store.release_all((1, 2))
        assert store.usage() == StoreUsage(1, 20, 4, mapped=37)  # the device may be at work on it
        driver.advance()
        assert store.tend() is None
        assert store.idle_pages == (4, 0)
        assert store.usage() == StoreUsage(1, 4, 4, mapped=37, unmapped=36)


def test_growth_within_a_page_calls_nothing(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, 1)
        before = len(driver.log)
        for end in range(1, 5):
            store.prepare_write(1, end - 1, end)
        assert len(driver.log) == before
        assert store.stats().mapped_pages == 2


def test_every_region_grows_by_its_own_pages() -> None:
    driver = FakeDriver()
    geometry = CacheGeometry.of(
        CacheConfig(
            max_seqs=3,
            capacity=100,
            max_write=8,
            groups=(
                LayerGroup(
                    "flat", tuple("abcde"), FlatPolicy(), 2, 64, "float32", layers_per_region=2
                ),
            ),
            page_size=PAGE,
            budget_bytes=100 * PAGE,
        )
    )
    with QuietStore(geometry, driver=driver) as store:
        assert len(geometry.regions) == 3
        store.prepare_write(1, 0, 9)
        assert store.committed_pages == 3 + geometry.pages_for(9) == 3 + 5 + 5 + 3
        for position in range(9):
            write(store, 1, position, position)
        assert all(holds(store, 1, position, position) for position in range(9))


def test_a_page_size_that_the_driver_cannot_map_is_refused() -> None:
    with pytest.raises(StoreError, match=r"page_size is 4096; .* a multiple of 8192"):
        made(FakeDriver(granularity=8192))


def test_a_store_that_cannot_start_leaves_nothing_behind(driver: FakeDriver) -> None:
    driver.refuse_after = 0
    with pytest.raises(StoreFullError):
        made(driver)
    driver.refuse_after = None
    driver.fail_next["reserve"] = StoreError("no addresses")
    with pytest.raises(StoreError, match="no addresses"):
        made(driver)


def test_a_refused_mapping_leaves_the_column_as_it_was(driver: FakeDriver) -> None:
    for call in ("map", "allow"):
        with made(driver) as store:
            store.prepare_write(1, 0, pages(3))
            driver.fail_next[call] = StoreFullError("no page tables", 0)
            with pytest.raises(StoreFullError, match="no page tables") as caught:
                store.prepare_write(1, 0, pages(9))
            assert caught.value.pages == 6
            assert store.committed_pages == 4
            store.prepare_write(1, 0, pages(9))
            assert store.committed_pages == 10


# --- zeros


def test_rows_are_zero_in_the_order_of_the_stream(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(2))
        assert driver.queued == ["zero", "zero"]  # scratch, column
        driver.advance()
        assert is_zero(store, 1)


def test_a_released_column_is_reused_in_place_without_the_driver(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(21))
        driver.advance()
        write(store, 1, 0, 5.0)
        seen: list[float] = []
        view = store.layer_view("a")[: pages(21), 1]
        driver.launch(view, lambda: seen.append(float(view[0, 0, 0, 0])))
        store.release(1)
        assert store.committed_pages == 1 and store.idle_pages == (0, 21)
        before = driver.calls.copy()
        store.prepare_write(1, 0, pages(21))
        made_calls = driver.calls - before
        assert set(made_calls) == {"zero", "drop"}
        assert store.stats().reused_pages == 21 and store.idle_pages == (0, 0)
        driver.advance()
        assert seen == [5.0]  # the kernel came first
        assert is_zero(store, 1)


def test_extents_beyond_the_new_need_go_back_behind_the_event(driver: FakeDriver) -> None:
    with made(driver, spare_bytes=0) as store:
        store.prepare_write(1, 0, pages(85))  # 64 16 4 1
        view = store.layer_view("a")[: pages(85), 1]
        driver.advance()
        driver.launch(view, lambda: None)
        store.release(1)
        store.prepare_write(1, 0, pages(64))
        assert store.committed_pages == 65 and store.idle_pages == (0, 21)
        assert store.tend() is not None
        assert driver.calls["unmap"] == 0
        driver.advance()
        assert store.tend() is None
        assert store.idle_pages == (0, 0) and store.resident_bytes() == 65 * PAGE


def test_an_extent_that_is_too_large_is_used_where_there_is_room(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(64))
        driver.advance()
        store.release(1)
        driver.launch(store.layer_view("a")[:4, 0], lambda: None)
        store.prepare_write(2, 0, pages(1))  # its zeros are behind what column 1 waits for
        store.release(1)
        store.prepare_write(1, 0, pages(40))
        assert store.committed_pages == 1 + 1 + 64 and driver.calls["wait"] == 0
        assert store.obtainable_pages() == 400 - 24
        store.prepare_write(1, 0, pages(60))
        assert store.obtainable_pages() == 400 - 4


@pytest.mark.parametrize("need", [10, 40], ids=["most of it wasted", "near the limit"])
def test_an_extent_that_is_too_large_is_given_up_otherwise(need: int) -> None:
    driver = FakeDriver(lag=True)
    with made(driver, one_group(400 if need == 10 else 70)) as store:
        store.prepare_write(1, 0, pages(64))
        store.release(1)
        store.prepare_write(1, 0, pages(need))
        assert store.committed_pages == 1 + need
        assert driver.calls["wait"] == 1 and store.stats().waits == 1


def test_pages_of_one_column_are_zero_in_another(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=6)) as store:
        store.prepare_write(1, 0, pages(5))
        driver.advance()
        store.layer_view("a")[: pages(5), 1] = 3.0
        store.release(1)
        store.prepare_write(2, 0, pages(5))
        driver.advance()
        assert is_zero(store, 2)
        assert driver.held == 6 * PAGE


def test_rows_given_up_by_a_rewind_are_zero_even_within_a_live_extent(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(16))
        driver.advance()
        store.layer_view("a")[: pages(16), 1] = 3.0
        store.shrink(1, 6)
        assert store.committed_pages == 17
        store.prepare_write(1, 6, pages(16))
        driver.advance()
        view = store.layer_view("a")[: pages(16), 1]
        assert bool((view[:8] == 3).all()) and not view[8:].any()  # whole pages


def test_work_goes_to_the_stream_that_the_caller_is_on(driver: FakeDriver) -> None:
    with made(driver) as store:
        before = driver.calls["join"]
        driver.stream = 8
        store.prepare_write(1, 0, 1)
        assert driver.calls["join"] == before + 1
        store.prepare_write(2, 0, 1)
        assert driver.calls["join"] == before + 1


def test_nothing_changes_while_the_stream_is_captured(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, 4)
        driver.capturing = True
        store.prepare_write(1, 0, 4)
        with pytest.raises(StoreError, match="current stream is capturing a graph"):
            store.prepare_write(1, 4, 5)
        with pytest.raises(StoreError, match="current stream is capturing a graph"):
            store.release(1)
        driver.capturing = False
        assert store.committed_pages == 2


# --- unmapping


def test_pages_are_unmapped_behind_the_event_alone(driver: FakeDriver) -> None:
    """The driver fails loudly if a queued kernel touches what is unmapped."""
    with made(driver, spare_bytes=0) as store:
        for col in (1, 2, 3):
            store.prepare_write(col, 0, pages(5))
        driver.advance()
        for col in (1, 2):
            driver.launch(store.layer_view("a")[: pages(5), col], lambda: None)
            store.release(col)
        assert store.tend() is not None and driver.calls["unmap"] == 0
        driver.advance(1)
        assert store.tend() is not None and store.idle_pages == (0, 5)
        driver.advance(1)
        assert store.tend() is None and store.idle_pages == (0, 0)
        assert store.resident_bytes() == driver.held == 6 * PAGE


def test_the_fake_driver_sees_an_early_unmap(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(5))
        driver.advance()
        driver.launch(store.layer_view("a")[: pages(5), 1], lambda: None)
        driver.push()
        address = store.layer_view("a")[0, 1].data_ptr()
        with pytest.raises(AssertionError, match="kernel that is still queued touches"):
            driver.unmap(address, 5 * PAGE)
        driver.pop()


def test_the_keeper_unmaps_a_few_extents_at_a_time(driver: FakeDriver) -> None:
    with made(driver, spare_bytes=0) as store:
        for end in range(1, 11):
            store.prepare_write(1, 0, pages(end))
        driver.advance()
        store.release(1)
        before = len(driver.log)
        store.tend()
        assert grown(driver, before, "unmap") == [4, 4, 2]
        assert store.resident_bytes() == PAGE and store.idle_pages == (0, 0)


def test_spare_memory_is_kept_up_to_its_bound(driver: FakeDriver) -> None:
    with made(driver, spare_bytes=20 * PAGE) as store:
        store.prepare_write(1, 0, pages(64 + 16 + 4))
        driver.advance()
        store.release(1)
        store.trim()
        assert store.idle_pages == (20, 0)
        before = driver.calls["create"]
        store.prepare_write(2, 0, pages(20))
        assert driver.calls["create"] == before
        driver.advance()
        store.release(2)
        store.spare_bytes = 4 * PAGE
        store.trim()
        assert store.idle_pages == (4, 0)


def test_close_frees_memory_at_once_and_addresses_with_the_last_tensor() -> None:
    driver = FakeDriver(lag=True)
    store = made(driver)
    store.prepare_write(1, 0, pages(9))
    store.prepare_write(2, 0, pages(9))
    store.release(2)
    view = store.layer_view("a")
    store.close()
    store.close()
    assert driver.held == 0 and driver.calls["synchronize"] == 1
    with pytest.raises(AssertionError, match="1 reservations are left"):
        driver.assert_clean()
    del view
    gc.collect()
    driver.assert_clean()


def test_a_store_that_is_dropped_without_close_gives_all_back() -> None:
    driver = FakeDriver()
    store = CudaVmmStore(one_group(), driver=driver)
    store.prepare_write(1, 0, pages(9))
    store.release(1)
    del store
    gc.collect()
    driver.assert_clean()


# --- where pages come from, in order


def test_spare_pages_come_first_then_retired_ones_then_new(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(4))
        store.prepare_write(2, 0, pages(4))
        driver.advance()
        store.release(1)
        store.trim()
        store.release(2)
        created = driver.calls["create"]
        store.prepare_write(3, 0, pages(4))
        assert (driver.calls["create"], store.idle_pages) == (created, (0, 4))
        store.prepare_write(4, 0, pages(4))
        assert (driver.calls["create"], store.idle_pages) == (created, (0, 0))
        store.prepare_write(5, 0, pages(4))
        assert driver.calls["create"] == created + 1


def test_memory_that_torch_caches_is_asked_for_when_the_driver_refuses() -> None:
    driver = FakeDriver(capacity=20 * PAGE, neighbour=14 * PAGE, cached=10 * PAGE)
    with made(driver) as store:
        store.prepare_write(1, 0, pages(5))
        assert driver.calls["empty_cache"] == 0
        store.prepare_write(2, 0, pages(10))
        assert driver.calls["empty_cache"] == 1 and driver.held == 16 * PAGE


def test_spare_extents_of_other_sizes_are_traded_at_the_limit(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=70)) as store:
        store.prepare_write(1, 0, pages(64))
        driver.advance()
        store.release(1)
        store.trim()
        assert store.idle_pages == (64, 0)
        store.prepare_write(2, 0, pages(9))  # 4 4 1 from the rest of the limit, then traded
        assert store.committed_pages == 10 and store.idle_pages == (0, 0)
        driver.advance()
        store.release(2)
        for end in range(1, 65):
            store.prepare_write(3, 0, pages(end))
        driver.advance()
        store.release(3)
        before = len(driver.log)
        store.prepare_write(4, 0, pages(69))
        assert grown(driver, before, "create")[0] == 64
        assert driver.held <= 70 * PAGE
        assert driver.calls["wait"] == 0


def test_smaller_extents_serve_where_large_ones_are_refused() -> None:
    driver = FakeDriver(capacity=10 * PAGE)
    with made(driver) as store:
        store.prepare_write(1, 0, pages(6))
        store.release(1)
        before = len(driver.log)
        store.prepare_write(2, 0, pages(9))
        assert grown(driver, before, "map") == [4, 2, 2, 1]
        assert store.committed_pages == 10


def test_the_device_is_waited_for_last(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=11)) as store:
        store.prepare_write(1, 0, pages(5))
        store.prepare_write(2, 0, pages(5))
        driver.advance()
        for col in (1, 2):
            driver.launch(store.layer_view("a")[: pages(5), col], lambda: None)
            store.release(col)
        store.prepare_write(3, 0, pages(4))
        assert driver.calls["wait"] == 1 and driver.queued == ["kernel", "zero"]
        store.prepare_write(4, 0, pages(6))
        assert driver.calls["wait"] == 2 and driver.held <= 11 * PAGE


def test_a_full_store_says_what_it_holds_and_works_again(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=11)) as store:
        store.prepare_write(1, 0, pages(5))
        with pytest.raises(
            StoreFullError,
            match=r"no memory for 6 pages of 4096 bytes: 11 of 11 pages are held, 10 of them",
        ) as caught:
            store.prepare_writes({2: (0, pages(4)), 1: (pages(5), pages(11))})
        assert caught.value.pages == 6
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert store.committed_pages == 10  # column 2 was prepared, column 1 is as it was
        store.release(2)
        store.prepare_write(1, pages(5), pages(10))
        driver.advance()
        store.layer_view("a")[: pages(10), 1] = 2.0
        assert store.committed_pages == 11


def test_what_a_refused_call_had_grown_goes_back_with_a_rewind() -> None:
    geometry = CacheGeometry.of(config(ahead_rows=0))
    driver = FakeDriver()
    with made(driver, geometry) as store:
        store.prepare_write(1, 0, 4)
        before = store.committed_pages
        store.limit_pages = store.committed_pages + 10
        with pytest.raises(StoreFullError):
            store.prepare_write(1, 4, 41)
        assert store.committed_pages > before
        store.shrink(1, 4)
        assert store.committed_pages == before


def test_a_neighbour_takes_the_memory_and_gives_it_back(driver: FakeDriver) -> None:
    driver.capacity = 60 * PAGE
    with made(driver) as store:
        store.prepare_write(1, 0, pages(20))
        driver.neighbour = 35 * PAGE
        with pytest.raises(StoreFullError, match="21 of them mapped, and 0 bytes of the device"):
            store.prepare_write(2, 0, pages(20))
        driver.neighbour = 0
        store.prepare_write(2, 0, pages(20))
        assert store.committed_pages == 41


def test_the_limit_can_be_lowered_and_raised(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.limit_pages = 10
        store.prepare_write(1, 0, pages(9))
        with pytest.raises(StoreFullError, match="10 of 10 pages are held"):
            store.prepare_write(2, 0, 1)
        store.limit_pages = None
        store.prepare_write(2, 0, 1)
        store.limit_pages = 5
        driver.advance()
        store.release(2)
        store.trim()
        assert store.resident_bytes() == 10 * PAGE  # what is in use stays
        assert store.obtainable_pages() == 10


def test_obtainable_pages_follow_limit_and_device() -> None:
    driver = FakeDriver(capacity=300 * PAGE)
    with made(driver) as store:
        store.MARGIN_BYTES = 10 * PAGE  # type: ignore[misc]
        assert store.obtainable_pages() == 290
        store.prepare_write(1, 0, pages(20))
        assert store.obtainable_pages() == 290
        driver.neighbour = 100 * PAGE
        assert store.obtainable_pages() == 190
        store.release(1)
        assert store.obtainable_pages() == 190
        store.limit_pages = 30
        assert store.obtainable_pages() == 30


# --- ahead of need


def test_ahead_rows_are_part_of_what_a_column_takes(driver: FakeDriver) -> None:
    geometry = one_group(ahead_rows=6)
    assert geometry.scratch_pages == 1
    assert [geometry.pages_for(n) for n in (0, 1, 2, 3, 994, 995, 1000)] == [
        *(0, 2, 2, 3, 250, 250, 250)
    ]
    with made(driver, geometry) as store:
        assert store.committed_pages == 1
        assert store.pages_needed({1: (0, 3)}) == 3
        store.prepare_write(1, 0, 3)
        assert store.committed_pages == 4
        assert store.pages_needed({1: (3, 12)}) == 0
        before = len(driver.log)
        store.prepare_write(1, 3, 12)
        assert len(driver.log) == before
        assert store.pages_needed({1: (3, 13)}) == 2
        store.prepare_write(1, 12, 13)
        assert store.committed_pages == 1 + geometry.pages_for(13)


def test_the_keeper_grows_what_it_is_asked_for_and_the_caller_only_compares() -> None:
    driver = FakeDriver()
    with CudaVmmStore(one_group(ahead_rows=6), driver=driver) as store:
        store.prepare_write(1, 0, 3)
        caller = store.stats().caller_seconds
        for end in range(4, 60):
            store.prepare_ahead({1: end})
            assert store.settle(10)
            store.prepare_write(1, end - 1, end)
            assert store.committed_pages == 1 + store.geometry.pages_for(end)
        assert store.stats().caller_seconds == caller
        assert store.stats().keeper_seconds > 0
        assert driver.threads["enter_thread"] == {"kv-columns-keeper"}
        view = store.layer_view("a")
        assert not view[:64, 1].any()


def test_a_hint_for_what_is_there_wakes_nobody(driver: FakeDriver) -> None:
    with CudaVmmStore(one_group(ahead_rows=6), driver=driver) as store:
        store.prepare_write(1, 0, 3)
        store.prepare_ahead({1: 6})
        assert "kv-columns-keeper" not in {thread.name for thread in threading.enumerate()}
        with pytest.raises(StoreError, match="prepare_ahead: column is 0"):
            store.prepare_ahead({0: 2})
        with pytest.raises(StoreError, match=r"prepare_ahead: positions are \[0, 1001\)"):
            store.prepare_ahead({1: 1001})


def test_the_keeper_neither_waits_nor_trades_nor_complains() -> None:
    driver = FakeDriver(lag=True)
    with CudaVmmStore(one_group(11), driver=driver) as store:
        store.prepare_write(1, 0, pages(5))
        store.prepare_write(2, 0, pages(4))
        driver.advance()
        driver.launch(store.layer_view("a")[: pages(5), 1], lambda: None)
        store.release(1)
        store.prepare_ahead({2: pages(7)})
        store.prepare_ahead({3: pages(1)})
        while store._chores.requests:
            store._keeper.settle(0.01)
        assert driver.calls["wait"] == driver.calls["empty_cache"] == 0
        assert store.committed_pages <= 6
        store.prepare_write(2, 0, pages(7))
        assert driver.calls["wait"] == 1


def test_the_keeper_does_not_wait_for_what_is_in_its_way(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(64))
        driver.advance()
        driver.launch(store.layer_view("a")[:4, 0], lambda: None)
        store.release(1)
        store.prepare_ahead({1: pages(1)})
        store.tend()
        assert driver.queued == ["kernel"] and store.committed_pages == 1
        driver.advance()
        store.prepare_ahead({1: pages(1)})
        store.tend()
        assert store.committed_pages == 2


def test_a_release_ends_what_the_keeper_was_asked_for(driver: FakeDriver) -> None:
    with made(driver) as store:
        store.prepare_write(1, 0, pages(1))
        store.prepare_ahead({1: pages(9)})
        store.release(1)
        store.tend()
        assert store.committed_pages == 1


def test_memory_follows_the_load_without_another_call() -> None:
    driver = FakeDriver(lag=True)
    with CudaVmmStore(one_group(), driver=driver, spare_bytes=3 * PAGE) as store:
        store.prepare_write(1, 0, pages(85))
        driver.launch(store.layer_view("a")[:4, 1], lambda: None)
        store.release(1)
        assert not store.settle(0.1)
        assert driver.held == 86 * PAGE
        driver.advance()
        assert store.settle(10)
        assert driver.held == 2 * PAGE  # the scratch page, and one of three that may be spare
        assert driver.threads["unmap"] == driver.threads["release"] == {"kv-columns-keeper"}


def test_what_fails_in_the_keeper_is_told_to_the_next_caller() -> None:
    driver = FakeDriver()
    with CudaVmmStore(one_group(), driver=driver) as store:
        store.prepare_write(1, 0, pages(1))
        driver.fail_next["map"] = StoreError("cuMemMap failed: CUDA_ERROR_LAUNCH_FAILED")
        store.prepare_ahead({1: pages(2)})
        assert store.settle(10)
        with pytest.raises(StoreError, match="LAUNCH_FAILED"):
            store.prepare_write(1, 0, 1)
        store.prepare_write(1, 0, pages(2))
        store.prepare_ahead({1: pages(3)})
        assert store.settle(10)
        assert store.committed_pages == 4


def test_the_caller_helps_where_the_keeper_falls_behind(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaVmmStore, "MOST_URGENT", 2)
    with made(driver, one_group(ahead_rows=6)) as store:  # its keeper does nothing
        store.prepare_writes({col: (0, 2) for col in (1, 2, 3, 4)})
        assert store.committed_pages == 1 + 4 * 2
        store.prepare_ahead({1: 3, 2: 4, 3: 3, 4: 4})  # of eight rows
        assert store.committed_pages == 1 + 4 * 2
        store.prepare_ahead({1: 4, 2: 5, 3: 6, 4: 7})
        assert store.committed_pages == 1 + 4 * 2 + 2


def test_a_refusal_in_the_keeper_is_told_to_nobody() -> None:
    driver = FakeDriver()
    with CudaVmmStore(one_group(), driver=driver) as store:
        store.prepare_write(1, 0, pages(1))
        driver.refuse_after = 0
        store.prepare_ahead({1: pages(2)})
        assert store.settle(10)
        store.prepare_write(1, 0, 1)
        with pytest.raises(StoreFullError):
            store.prepare_write(1, 0, pages(2))
        driver.refuse_after = None
        store.prepare_write(1, 0, pages(2))


def test_caller_and_keeper_work_on_the_same_columns_at_once() -> None:
    driver = FakeDriver()
    geometry = CacheGeometry.of(config(capacity=400, budget_bytes=700 * PAGE, ahead_rows=3))
    with CudaVmmStore(geometry, driver=driver, spare_bytes=20 * PAGE) as store:
        for turn in range(60):
            ends = {col: 1 + (turn * 7 * col) % 90 for col in (1, 2, 3, 4)}
            for _ in range(6):
                store.prepare_ahead(ends)
                store.prepare_writes({col: (end - 1, end) for col, end in ends.items()})
                for col, end in ends.items():
                    write(store, col, end - 1, col + end)
                ends = {col: end + 2 for col, end in ends.items()}
            for col, end in ends.items():
                assert holds(store, col, end - 3, col + end - 2)
                if (turn + col) % 2:
                    store.release(col)
            used = store.geometry.scratch_pages + sum(map(geometry.pages_for, ends.values()))
            assert store.committed_pages <= used
        assert store.settle(10)
        for col in (1, 2, 3, 4):
            store.release(col)
        assert store.settle(10)
        assert store.committed_pages == geometry.scratch_pages
        spare, idle = store.idle_pages
        assert spare <= 20 and idle == 0
        assert driver.held == (spare + geometry.scratch_pages) * PAGE


def test_two_bytes_a_number_and_inference_mode(driver: FakeDriver) -> None:
    group = LayerGroup("flat", ("a",), FlatPolicy(), 2, 64, "bfloat16")
    with torch.inference_mode():
        store = made(driver, one_group(groups=(group,)))
    store.prepare_write(1, 0, 9)
    driver.advance()
    store.layer_view("a")[8, 1] = 1.5
    assert float(store.layer_view("a")[:9, 1].sum()) == 1.5 * 256
    store.close()
