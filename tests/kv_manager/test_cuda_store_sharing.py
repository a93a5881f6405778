"""Pages that columns of cuda-vmm share: counted once, never written, freed with the last of them.

Memory is real here: two mappings of an extent show the same bytes, so that a write to a page that
is shared is seen in the other column.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    FlatPolicy,
    LayerGroup,
    RingPolicy,
    StoreError,
    StoreFullError,
)
from vllm_kv_columns.kv_manager.stores.cuda import CudaVmmStore

from .builders import PAGE
from .fake_driver import FakeDriver
from .test_cuda_store import QuietStore, grown, made, one_group, pages


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver(lag=True)
    yield driver
    gc.collect()
    driver.assert_clean()


def rows(store: CudaVmmStore, col: int, start: int, end: int) -> torch.Tensor:
    return store.layer_view("a")[start:end, col]


def fill(store: CudaVmmStore, driver: FakeDriver, col: int, start: int, end: int, x: float) -> None:
    """Write positions as a kernel does, behind what is queued."""
    store.prepare_write(col, start, end)
    view = rows(store, col, start, end)
    driver.launch(view, lambda: view.fill_(x))


def has(store: CudaVmmStore, driver: FakeDriver, col: int, start: int, end: int, x: float) -> bool:
    driver.advance()
    return bool((rows(store, col, start, end) == x).all())


# --- what a clone takes and costs


def test_a_clone_shares_whole_pages_and_copies_the_partial_one(driver: FakeDriver) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(21) - 2, 4)
        before = len(driver.log)
        store.clone(1, 2, pages(21) - 2)
        assert grown(driver, before, "map") == [16, 4, 1]
        assert grown(driver, before, "allow") == [21]
        assert grown(driver, before, "create") == grown(driver, before, "copy") == [1]
        assert store.committed_pages == 1 + 21 + 1
        assert store.resident_bytes() == driver.held == 23 * PAGE
        store.release(1)
        assert store.committed_pages == 1 + 20 + 1 and store.idle_pages == (0, 1)
        assert has(store, driver, 2, 0, pages(21) - 2, 4)


def test_a_clone_of_whole_pages_takes_no_page_and_copies_nothing(driver: FakeDriver) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(21), 4)
        before = driver.calls.copy()
        store.clone(1, 2, pages(20))
        store.clone(2, 3, pages(20))
        assert not {"create", "copy", "zero"} & set(driver.calls - before)
        assert store.committed_pages == 22
        assert has(store, driver, 3, 0, pages(20), 4)


def test_sixteen_thousand_rows_of_an_8b_model_are_cloned_with_few_calls() -> None:
    """Each map costs 2.5 us, each access right 26 us an extent, each creation 10 us."""
    group = LayerGroup("flat", ("a",), FlatPolicy(), 1, 32, "float32")  # 16 rows a page, as there
    geometry = one_group(2100, groups=(group,), capacity=16 * 1024, max_write=16 * 1024)
    driver = FakeDriver()
    with made(driver, geometry) as store:
        n = 16 * 1024 - 5
        for start in range(0, n, 2048):  # a prompt in chunks
            store.prepare_write(1, start, min(start + 2048, n))
        for src, copied in ((1, 64), (2, 1)):  # of the prompt, then of the clone
            committed, before, log = store.committed_pages, driver.calls.copy(), len(driver.log)
            store.clone(src, src + 1, n)
            made_calls = driver.calls - before
            print(f"\n{dict(made_calls)}")
            assert grown(driver, log, "map") == [64] * 15 + [32, 16, 8, 4, 2, 1] + [1]
            assert grown(driver, log, "copy") == [copied]
            assert made_calls["create"] == (7 if src == 1 else 1) and made_calls["allow"] == 1
            assert store.committed_pages == committed + copied
            microseconds = made_calls["map"] * (2.5 + 26) + made_calls["create"] * 10
            assert microseconds < 750


@pytest.mark.parametrize(
    ("n", "shared", "copied"),
    [
        (31, 0, [16, 8, 4, 2, 1]),
        (60, 0, [32, 16, 8, 4]),
        (63, 0, [32, 16, 8, 4, 2, 1]),
        (64, 64, []),
        (70, 64, [4, 2]),
        (72, 72, []),
    ],
)
@pytest.mark.parametrize("partial", [0, 1], ids=["whole pages", "and a row"])
@pytest.mark.parametrize("ahead", [0, 3, 17])
def test_extents_are_shared_whole_and_what_lies_below_the_length_is_copied(
    n: int, shared: int, copied: list[int], partial: int, ahead: int
) -> None:
    driver = FakeDriver(lag=True)
    geometry = one_group(ahead_rows=ahead)
    with made(driver, geometry) as store:
        start = 0
        for size in (64, 72, 80):  # extents of 64, 8 and 8 pages
            fill(store, driver, 1, start, pages(size) - ahead, 4)
            start = pages(size) - ahead
        rows_taken = pages(n) + partial
        for src in (1, 2, 3):
            begins, before = store.committed_pages, len(driver.log)
            taken = copied if src == 1 else []  # clones end with extents of their own
            rest = geometry.pages_for(rows_taken) - n
            store.clone(src, src + 1, rows_taken)
            assert grown(driver, before, "create")[: len(taken)] == taken
            assert sum(grown(driver, before, "copy")) == sum(taken) + partial
            assert store.committed_pages == begins + sum(taken) + rest
            assert has(store, driver, src + 1, 0, rows_taken, 4)
            assert not rows(store, src + 1, pages(n + partial), pages(n + rest)).any()
        for col in (1, 3, 4):
            store.release(col)
        assert store.committed_pages == 1 + geometry.pages_for(rows_taken)
        assert store.obtainable_pages() == 400
        assert has(store, driver, 2, 0, rows_taken, 4)
    gc.collect()
    driver.assert_clean()


def test_the_driver_maps_allocations_as_a_whole(driver: FakeDriver) -> None:
    driver.push()
    address, extent = driver.reserve(4 * PAGE, PAGE), driver.create(2 * PAGE)
    for size in (1, 3):
        with pytest.raises(StoreError, match=r"cuMemMap of \d+ bytes failed: .*_NOT_SUPPORTED"):
            driver.map(address, size * PAGE, extent)
    driver.map(address, 2 * PAGE, extent)
    driver.map(address + 2 * PAGE, 2 * PAGE, extent)
    driver.unmap(address, 4 * PAGE)
    driver.release(extent)
    driver.free(address, 4 * PAGE)
    driver.pop()


# --- nothing shared is written


@pytest.mark.parametrize("writer", [1, 2], ids=["source", "clone"])
def test_going_on_after_a_clone_needs_no_copy(driver: FakeDriver, writer: int) -> None:
    with made(driver) as store:
        n = pages(9) - 2
        fill(store, driver, 1, 0, n, 4)
        store.clone(1, 2, n)
        assert store.writable()[writer] == pages(9)
        assert store.pages_needed({writer: (n, n + 1), 3 - writer: (n, n + 2)}) == 0
        before = len(driver.log)
        fill(store, driver, writer, n, n + 1, 7)
        assert len(driver.log) == before
        fill(store, driver, writer, n + 1, n + 20, 7)
        assert has(store, driver, writer, 0, n, 4) and has(store, driver, writer, n, n + 20, 7)
        assert has(store, driver, 3 - writer, 0, n, 4)
        assert not rows(store, 3 - writer, n, pages(9)).any()
        assert store.stats().waits == 0


@pytest.mark.parametrize("writer", [1, 2], ids=["source", "clone"])
@pytest.mark.parametrize("back", [0, 2, 12, 30, 45, 67, 83])
def test_a_column_that_goes_back_and_on_leaves_the_other_its_rows(
    driver: FakeDriver, writer: int, back: int
) -> None:
    with made(driver) as store:
        n = pages(21)
        fill(store, driver, 1, 0, n, 4)
        store.clone(1, 2, n)
        store.shrink(writer, back)
        assert store.writable()[writer] <= back
        needed, before = store.pages_needed({writer: (back, n)}), store.committed_pages
        assert needed > 0
        store.prepare_write(writer, back, n)
        assert store.committed_pages == before + needed
        driver.advance()
        assert not rows(store, writer, -(-back // 4) * 4, n).any()  # whole pages
        fill(store, driver, writer, back, n, 7)
        assert has(store, driver, writer, 0, back, 4) and has(store, driver, writer, back, n, 7)
        assert has(store, driver, 3 - writer, 0, n, 4)


@pytest.mark.parametrize("writer", [1, 2], ids=["source", "clone"])
def test_a_write_into_the_middle_copies_the_extents_that_it_touches(
    driver: FakeDriver, writer: int
) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(21), 4)  # 16 4 1
        store.clone(1, 2, pages(21))
        before = len(driver.log)
        assert store.pages_needed({writer: (pages(10), pages(10) + 1)}) == 16
        fill(store, driver, writer, pages(10), pages(10) + 1, 7)
        assert grown(driver, before, "copy") == [16]
        assert store.committed_pages == 1 + 21 + 16
        fill(store, driver, writer, pages(3), pages(3) + 1, 8)  # private by now
        assert store.committed_pages == 1 + 21 + 16
        fill(store, driver, writer, pages(17), pages(17) + 1, 9)
        assert grown(driver, before, "copy") == [16, 4]
        assert store.committed_pages == 1 + 21 + 16 + 4
        assert has(store, driver, 3 - writer, 0, pages(21), 4)
        ends = ((0, 12, 4), (12, 13, 8), (13, 40, 4), (40, 41, 7), (41, 68, 4), (68, 69, 9))
        for start, end, value in (*ends, (69, 84, 4)):
            assert has(store, driver, writer, start, end, value)


@pytest.mark.parametrize("writer", [1, 2], ids=["source", "clone"])
@pytest.mark.parametrize("ahead", [0, 9])
def test_a_column_that_goes_back_into_a_shared_extent_takes_only_what_it_needs(
    writer: int, ahead: int
) -> None:
    driver = FakeDriver(lag=True)
    geometry = one_group(ahead_rows=ahead)
    with made(driver, geometry) as store:
        fill(store, driver, 1, 0, pages(64), 4)
        fill(store, driver, 1, pages(64), pages(85), 4)
        store.clone(1, 2, pages(85))
        store.shrink(writer, pages(40))
        begins, before = store.committed_pages, len(driver.log)
        for end in (pages(40) + 1, pages(50), pages(70)):
            wants = {writer: (pages(40), end)}
            needed, committed = store.pages_needed(wants), store.committed_pages
            store.prepare_writes(wants)
            assert store.committed_pages == committed + needed
            assert store.committed_pages == begins + geometry.pages_for(end)
        assert grown(driver, before, "copy") == [40]
        driver.advance()
        assert not rows(store, writer, pages(40), pages(70)).any()
        fill(store, driver, writer, pages(40), pages(70), 7)
        assert has(store, driver, writer, 0, pages(40), 4)
        assert has(store, driver, 3 - writer, 0, pages(85), 4)
        store.release(3 - writer)
        assert store.committed_pages == 1 + geometry.pages_for(pages(70))
    gc.collect()
    driver.assert_clean()


def test_a_shared_extent_with_private_ones_behind_is_exchanged_as_a_whole(
    driver: FakeDriver,
) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(64), 4)
        store.clone(1, 2, pages(64))
        store.shrink(2, pages(40))
        store.prepare_ahead({2: pages(80)})
        store.tend()
        assert store.committed_pages == 1 + 64 + 16
        assert store.pages_needed({2: (pages(40), pages(41))}) == 64
        fill(store, driver, 2, pages(40), pages(41), 7)
        assert store.committed_pages == 1 + 64 + 16 + 64
        fill(store, driver, 2, pages(41), pages(80), 7)
        assert has(store, driver, 1, 0, pages(64), 4)
        assert has(store, driver, 2, 0, pages(40), 4)
        assert has(store, driver, 2, pages(40), pages(80), 7)


def test_queued_kernels_read_what_was_there_before_a_copy(driver: FakeDriver) -> None:
    """The driver fails loudly if pages are exchanged under a queued kernel."""
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(5), 4)
        store.clone(1, 2, pages(5))
        seen: list[bool] = []
        for col in (1, 2):
            view = rows(store, col, 0, pages(5))
            driver.launch(view, lambda view=view: seen.append(bool((view == 4).all())))  # type: ignore[misc]
        fill(store, driver, 2, 0, pages(5), 7)
        assert seen == [True, True] and store.stats().waits > 0
        assert has(store, driver, 1, 0, pages(5), 4)


def test_the_last_column_of_a_page_writes_in_place(driver: FakeDriver) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(4), 4)
        store.clone(1, 2, pages(4))
        store.clone(1, 3, pages(4))
        wants = {col: (0, pages(4)) for col in (1, 2, 3)}
        assert store.pages_needed(wants) == 8
        store.prepare_writes(wants)
        assert store.committed_pages == 1 + 12 and store.pages_needed(wants) == 0
        for col in (1, 2, 3):
            fill(store, driver, col, 0, pages(4), col)
        assert all(has(store, driver, col, 0, pages(4), col) for col in (1, 2, 3))


def test_rows_given_up_where_they_were_shared_are_zero_when_they_come_again(
    driver: FakeDriver,
) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(16), 4)
        store.clone(1, 2, pages(16))
        store.shrink(2, 6)
        driver.advance()
        assert has(store, driver, 1, 0, pages(16), 4)  # not zeroed, it is the other's
        store.release(1)
        store.prepare_ahead({2: pages(3)})
        store.tend()
        assert store.pages_needed({2: (6, pages(16))}) == 0  # nobody else's any more
        store.prepare_write(2, 6, pages(16))
        driver.advance()
        assert bool((rows(store, 2, 0, 8) == 4).all()) and not rows(store, 2, 8, pages(16)).any()


# --- the way back


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (2, 1, 3)])
def test_pages_are_free_when_the_last_column_is_gone_and_its_work_done(
    driver: FakeDriver, order: tuple[int, ...]
) -> None:
    with made(driver, spare_bytes=0) as store:
        fill(store, driver, 1, 0, pages(20), 4)
        store.clone(1, 2, pages(20))
        store.clone(2, 3, pages(18))  # shares 16 and copies 2
        driver.advance()
        for gone, col in enumerate(order):
            others = [other for other in order[gone:] if other != col]
            view = rows(store, col, 0, pages(18))
            driver.launch(view, lambda: None)
            store.release(col)
            assert store.tend() is not None
            kept = 16 * bool(others) + 4 * bool({1, 2} & set(others)) + 2 * (3 in others)
            assert store.committed_pages == 1 + kept
            assert driver.held == 23 * PAGE
            for other in others:
                assert bool((rows(store, other, 0, pages(18)) == 4).all())
        driver.advance(2)
        store.tend()
        last = 18 if order[-1] == 3 else 20
        assert driver.held == (1 + last) * PAGE and store.idle_pages == (0, last)
        driver.advance()
        assert store.tend() is None
        assert driver.held == PAGE and store.idle_pages == (0, 0)


def test_a_released_clone_is_not_reused_where_it_is_while_others_have_its_pages(
    driver: FakeDriver,
) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(20), 4)
        store.clone(1, 2, pages(20))
        store.release(2)
        fill(store, driver, 2, 0, pages(20), 7)
        assert has(store, driver, 1, 0, pages(20), 4) and has(store, driver, 2, 0, pages(20), 7)
        store.clone(1, 3, pages(20))
        store.release(1)
        store.release(3)  # both idle: either may take them again, but not both
        fill(store, driver, 1, 0, pages(20), 5)
        fill(store, driver, 3, 0, pages(20), 6)
        assert has(store, driver, 1, 0, pages(20), 5) and has(store, driver, 3, 0, pages(20), 6)


def test_a_clone_into_a_column_that_was_released_just_now(driver: FakeDriver) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(20), 4)
        fill(store, driver, 2, 0, pages(20), 5)
        store.release(2)
        store.clone(1, 2, pages(20) - 1)
        assert has(store, driver, 2, 0, pages(20) - 1, 4)
        store.release(2)
        store.clone(1, 2, pages(20) - 1)
        assert has(store, driver, 2, 0, pages(20) - 1, 4)


def test_clones_of_clones_and_forks_of_one_prompt(driver: FakeDriver) -> None:
    with made(driver) as store:
        n = pages(37) - 1
        fill(store, driver, 1, 0, n, 1)
        for src, dst in ((1, 2), (1, 3), (3, 4), (4, 5), (5, 6)):
            store.clone(src, dst, n)
        assert store.committed_pages == 1 + 37 + 5
        for col in range(1, 7):
            fill(store, driver, col, n, n + 5, 10 * col)
        assert store.committed_pages == 1 + 36 + 6 * 2
        store.release(4)
        store.shrink(3, 5)
        fill(store, driver, 3, 5, 9, 33)
        for col in (1, 2, 5, 6):
            assert has(store, driver, col, 0, n, 1)
            assert has(store, driver, col, n, n + 5, 10 * col)
        assert has(store, driver, 3, 0, 5, 1) and has(store, driver, 3, 5, 9, 33)


def test_a_closed_store_with_shared_pages_leaves_nothing(driver: FakeDriver) -> None:
    store = made(driver)
    fill(store, driver, 1, 0, pages(20), 4)
    store.clone(1, 2, pages(20))
    fill(store, driver, 2, 3, 4, 4)
    store.clone(1, 3, pages(20) - 2)
    store.release(1)
    store.close()
    assert driver.held == 0


# --- refusals


def test_a_clone_without_memory_leaves_its_column_empty(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=10)) as store:
        fill(store, driver, 1, 0, pages(9), 4)
        with pytest.raises(StoreFullError):
            store.clone(1, 2, pages(9) - 1)
        assert store.committed_pages == 10
        store.clone(1, 2, pages(9))
        assert store.committed_pages == 10
        assert has(store, driver, 2, 0, pages(9), 4)


@pytest.mark.parametrize("short", [1, 40])
def test_a_clone_whose_copies_are_beyond_the_limit_changes_nothing(
    driver: FakeDriver, short: int
) -> None:
    with made(driver, one_group(budget_pages=1 + 72 + 40 + 1)) as store:
        fill(store, driver, 1, 0, pages(72), 4)
        store.limit_pages = 1 + 72 + 40 + 1 - short
        calls, ready = driver.calls.copy(), list(store.writable())
        with pytest.raises(StoreFullError) as caught:
            store.clone(1, 2, pages(40) + 1)
        assert caught.value.pages == 40 + 1
        assert not {"map", "allow", "unmap", "copy", "zero"} & set(driver.calls - calls)
        assert store.committed_pages == 1 + 72 and list(store.writable()) == ready
        store.limit_pages = None
        store.clone(1, 2, pages(40) + 1)
        assert store.committed_pages == 1 + 72 + 41
        assert has(store, driver, 2, 0, pages(40) + 1, 4)


def test_a_copy_beyond_the_limit_after_a_rewind_changes_nothing(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=1 + 64 + 41)) as store:
        fill(store, driver, 1, 0, pages(64), 4)
        store.clone(1, 2, pages(64))
        store.shrink(2, pages(40))
        store.limit_pages = 1 + 64 + 40
        wants = {2: (pages(40), pages(40) + 1)}
        for _ in range(2):
            assert store.pages_needed(wants) == 41
            with pytest.raises(StoreFullError):
                store.prepare_writes(wants)
            assert store.committed_pages == 1 + 64
            assert has(store, driver, 2, 0, pages(40), 4)
        store.limit_pages = None
        fill(store, driver, 2, pages(40), pages(40) + 1, 7)
        assert store.committed_pages == 1 + 64 + 41 and store.obtainable_pages() == 1 + 64 + 41
        assert has(store, driver, 1, 0, pages(64), 4) and has(store, driver, 2, 0, pages(40), 4)


def test_a_clone_into_a_column_that_a_refused_call_had_grown(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=30)) as store:
        fill(store, driver, 1, 0, pages(9), 4)
        fill(store, driver, 2, 0, pages(5), 5)
        store.release(2)
        with pytest.raises(StoreFullError):
            store.prepare_write(2, 0, pages(40))
        assert store.committed_pages > 10
        store.clone(1, 2, pages(9))
        assert store.committed_pages == 10
        assert has(store, driver, 2, 0, pages(9), 4)


@pytest.mark.parametrize("call", ["map", "allow"])
def test_a_clone_that_the_driver_refuses_leaves_its_column_empty(
    driver: FakeDriver, call: str
) -> None:
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(9), 4)
        driver.fail_next[call] = StoreError("no page tables")
        with pytest.raises(StoreError, match="no page tables"):
            store.clone(1, 2, pages(9) - 1)
        assert store.committed_pages == 10
        fill(store, driver, 1, 0, pages(9), 5)
        store.clone(1, 2, pages(9) - 1)
        assert has(store, driver, 2, 0, pages(9) - 1, 5)


def test_a_budget_that_ends_between_two_copies_leaves_all_valid(driver: FakeDriver) -> None:
    with made(driver, one_group(budget_pages=1 + 21 + 4)) as store:
        fill(store, driver, 1, 0, pages(21), 4)  # 16 4 1
        store.clone(1, 2, pages(21))
        with pytest.raises(StoreFullError):
            store.prepare_write(2, 0, pages(21))
        for col in (1, 2):
            assert has(store, driver, col, 0, pages(21), 4)
        assert store.committed_pages <= 26 and store.writable()[2] in (0, pages(21))
        assert store.pages_needed({2: (0, pages(21))}) == 1 + 21 + 21 - store.committed_pages
        store.release(1)
        fill(store, driver, 2, 0, pages(21), 7)
        assert has(store, driver, 2, 0, pages(21), 7)


def refuse_once(driver: FakeDriver, call: str, failing: int) -> None:
    """Let the call with that number fail, from 1 on."""
    left, real = failing, getattr(driver, call)

    def refuse(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise StoreError("no page tables")
        real(*arguments)

    setattr(driver, call, refuse)


@pytest.mark.parametrize("failing", range(1, 6))
@pytest.mark.parametrize("call", ["map", "allow"])
def test_a_copy_that_the_driver_refuses_leaves_the_page_shared(
    driver: FakeDriver, call: str, failing: int
) -> None:
    """The window's mappings of 2 and 1 pages, then the column's: each of their calls fails once."""
    with made(driver) as store:
        fill(store, driver, 1, 0, pages(4), 4)
        store.clone(1, 2, pages(4))
        store.shrink(2, pages(3))
        real = getattr(driver, call)
        refuse_once(driver, call, failing)
        refused = False
        try:
            store.prepare_write(2, pages(2), pages(3))
        except StoreError:
            refused = True
        setattr(driver, call, real)
        assert refused == (failing <= (4 if call == "map" else 2))
        assert store.committed_pages == (5 if refused else 8)
        assert driver.held == (store.committed_pages + store.idle_pages[0]) * PAGE
        fill(store, driver, 2, pages(2), pages(3), 7)
        assert has(store, driver, 1, 0, pages(4), 4)
        assert has(store, driver, 2, pages(2), pages(3), 7)


# --- rings


def rings() -> CacheGeometry:
    """Two pages of 4 rows for each region; the ring keeps 40 rows, 10 pages."""
    group = LayerGroup("flat", ("a",), FlatPolicy(), 2, 64, "float32")
    ring = LayerGroup("ring", ("r",), RingPolicy(33), 2, 64, "float32")
    return CacheGeometry.of(
        CacheConfig(
            max_seqs=4,
            capacity=200,
            max_write=8,
            groups=(group, ring),
            page_size=PAGE,
            budget_bytes=400 * PAGE,
        )
    )


def put(store: CudaVmmStore, driver: FakeDriver, col: int, start: int, end: int, x: int) -> None:
    """Positions of both layers get x plus their number."""
    for position in range(start, end):
        store.prepare_write(col, position, position + 1)
        for layer, count in (("a", 200), ("r", 40)):
            row = store.layer_view(layer)[position % count, col]
            driver.launch(row, lambda row=row, value=x + position: row.fill_(value))  # type: ignore[misc]


def found(store: CudaVmmStore, driver: FakeDriver, col: int, end: int, layer: str) -> list[float]:
    """What the last rows hold, 30 of the ring."""
    driver.advance()
    count = 200 if layer == "a" else 40
    view = store.layer_view(layer)
    return [float(view[p % count, col, 1, 1, 5]) for p in range(max(0, end - 30), end)]


@pytest.mark.parametrize("writer", [1, 2], ids=["source", "clone"])
@pytest.mark.parametrize("length", [34, 39], ids=["partly backed", "almost full"])
def test_a_ring_is_shared_until_it_wraps_and_then_copied_as_a_whole(
    driver: FakeDriver, writer: int, length: int
) -> None:
    with made(driver, rings()) as store:
        full = length // 4  # pages of either region
        put(store, driver, 1, 0, length, 100)
        assert store.committed_pages == 2 + 2 * (full + 1)
        store.clone(1, 2, length)
        assert store.committed_pages == 2 + 2 * (full + 1) + 2
        put(store, driver, writer, length, 40, 500)
        assert store.stats().waits == 0
        assert store.pages_needed({writer: (40, 41)}) == 1 + full  # flat grows, the ring is copied
        put(store, driver, writer, 40, 90, 500)
        assert found(store, driver, writer, 90, "r") == [500 + p for p in range(60, 90)]
        for layer in "ar":
            expected = [100 + p for p in range(length - 30, length)]
            assert found(store, driver, 3 - writer, length, layer) == expected
        waits = store.stats().waits
        put(store, driver, 3 - writer, length, 90, 700)
        assert store.stats().waits == waits  # the last one of the ring writes in place
        assert found(store, driver, writer, 90, "r") == [500 + p for p in range(60, 90)]
        assert found(store, driver, 3 - writer, 90, "a") == [700 + p for p in range(60, 90)]


@pytest.mark.parametrize("length", [40, 53, 88])
def test_a_ring_that_has_wrapped_is_copied(driver: FakeDriver, length: int) -> None:
    with made(driver, rings()) as store:
        put(store, driver, 1, 0, length, 100)
        before = store.committed_pages
        store.clone(1, 2, length)
        assert store.committed_pages == before + 10 + (length % 4 > 0)
        assert store.pages_needed({1: (length, length + 1)}) == (length % 4 == 0)
        put(store, driver, 1, length, length + 30, 500)
        put(store, driver, 2, length, length + 8, 700)
        assert found(store, driver, 1, length + 30, "r")[0] == 500 + length
        expected = [100 + p for p in range(length - 22, length)]
        assert found(store, driver, 2, length + 8, "r")[:22] == expected
        assert store.stats().waits == 0


@pytest.mark.parametrize("failing", range(1, 12))
def test_a_clone_that_the_driver_refuses_in_one_region_leaves_all_of_them(
    driver: FakeDriver, failing: int
) -> None:
    with made(driver, rings()) as store:
        for start, end in ((0, 12), (12, 28)):
            store.prepare_write(1, start, end)  # of either region extents of 2, 1 and 4 pages
        put(store, driver, 1, 0, 28, 100)
        before, real = store.committed_pages, driver.map
        refuse_once(driver, "map", failing)
        refused = False
        try:
            store.clone(1, 2, 26)  # 2 and 1 shared, 2, 1 and a partial page copied
        except StoreError:
            refused = True
        driver.map = real  # type: ignore[method-assign]
        assert refused == (failing <= 10)
        assert store.committed_pages == before + (0 if refused else 8)
        store.release(2)
        driver.advance()
        store.trim()
        assert driver.held == (before + sum(store.idle_pages)) * PAGE
        store.clone(1, 2, 26)
        for layer in "ar":
            assert found(store, driver, 2, 26, layer) == [100 + p for p in range(26)]


def test_the_keeper_grows_clones_while_they_are_written() -> None:
    driver = FakeDriver()
    with CudaVmmStore(one_group(ahead_rows=6), driver=driver, spare_bytes=9 * PAGE) as store:
        for turn in range(20):
            n = 20 + 7 * turn
            fill(store, driver, 1, 0, n, turn)
            for dst in (2, 3, 4):
                store.clone(1, dst, n - dst)
            for end in range(n + 1, n + 30):
                store.prepare_ahead(dict.fromkeys((1, 2, 3, 4), end))
                for col in (1, 2, 3, 4):
                    fill(store, driver, col, end - 1, end, 100 * col)
            for col in (1, 2, 3, 4):
                assert has(store, driver, col, 0, n - 4, turn)
                assert has(store, driver, col, n, n + 29, 100 * col)
            for col in (2, 1, 4, 3) if turn % 2 else (3, 4, 2, 1):
                store.release(col)
        assert store.settle(10)
        assert store.committed_pages == 1


class Careless(QuietStore):
    """A store that does not look whether a page is shared."""

    def _write(self, col: int, start: int, end: int) -> None:
        self._growth.grow(col, end, self._access.stream)


def test_these_tests_see_a_shared_page_that_is_written(driver: FakeDriver) -> None:
    with Careless(one_group(), driver=driver) as store:
        store._reach.end[1] = pages(4)
        fill(store, driver, 1, 0, pages(4), 4)
        store.clone(1, 2, pages(4))
        fill(store, driver, 2, 0, 1, 7)
        assert not has(store, driver, 1, 0, pages(4), 4)
