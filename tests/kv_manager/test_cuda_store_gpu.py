"""The store cuda-vmm on a CUDA device. KV_COLUMNS_GPU_SMALL=1: sizes for a sanitizer."""

import os
import statistics
import threading
import time
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

pytestmark = pytest.mark.gpu

SMALL = os.environ.get("KV_COLUMNS_GPU_SMALL", "0") != "0"
MIB = 1 << 20
PAGE = 2 * MIB
HEADS, SIZE = 8, 128
SLACK = 64 * MIB  # what the driver and torch may take beside the pages


def geometry(layers: int = 4, **changes: Any) -> CacheGeometry:
    """4 layers: 16 KiB a row, 128 rows a page. 32 layers: 128 KiB, 16 rows, as an 8B model."""
    names = tuple(f"l{i}" for i in range(layers))
    return CacheGeometry.of(
        CacheConfig(
            **{
                "max_seqs": 32,
                "capacity": 64 * 1024,
                "max_write": 64 * 1024,
                "groups": (LayerGroup("flat", names, FlatPolicy(), HEADS, SIZE, "bfloat16"),),
                "page_size": PAGE,
                "budget_bytes": 60 << 30,
                **changes,
            }
        )
    )


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def column(store: CudaVmmStore, col: int, rows: int, layer: str = "l1") -> torch.Tensor:
    return store.layer_view(layer)[:rows, col]


def total(store: CudaVmmStore, col: int, rows: int) -> float:
    """Sum over all layers."""
    layers = store.geometry.layers
    return sum(float(column(store, col, rows, x).sum(dtype=torch.float64)) for x in layers)


def delay(seconds: float) -> torch.cuda.Event:
    """Keep the device busy for about so long; the event that ends it."""
    torch.cuda._sleep(int(seconds * 1.5e9))
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Take what torch itself takes for kernels, so that it does not look like the store's."""
    x = torch.ones(1000, device="cuda", dtype=torch.bfloat16)
    float(x.sum(dtype=torch.float64))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


@pytest.fixture
def store() -> Iterator[CudaVmmStore]:
    with CudaVmmStore(geometry(), spare_bytes=0) as made:
        yield made


# --- memory as the device reports it


def test_a_reservation_of_hundreds_of_gigabytes_takes_no_memory() -> None:
    wide = geometry(32, max_seqs=256, capacity=16 * 1024)
    assert wide.regions[0].nbytes > 500 << 30
    before = free()
    with CudaVmmStore(wide) as store:
        assert store.resident_bytes() == PAGE
        assert before - free() <= PAGE + SLACK
        assert store.layer_view("l31").shape == (16 * 1024, 257, 2, HEADS, SIZE)


def test_memory_follows_growth_release_and_trimming(store: CudaVmmStore) -> None:
    before = free()
    pages = 200
    store.prepare_write(1, 0, 128 * pages)
    taken = before - free()
    assert pages * PAGE <= taken <= pages * PAGE + SLACK
    store.shrink(1, 128 * 64)
    assert store.settle(10)
    assert before - free() <= 64 * PAGE + SLACK
    store.release(1)
    assert store.settle(10)
    assert before - free() <= SLACK
    assert store.resident_bytes() == PAGE


def test_close_gives_memory_back_while_a_tensor_is_about() -> None:
    before = free()
    store = CudaVmmStore(geometry())
    store.prepare_write(1, 0, 128 * 50)
    view = store.layer_view("l0")
    store.close()
    assert before - free() <= SLACK
    del view


def test_a_full_device_is_refused_and_works_again_when_memory_returns() -> None:
    with CudaVmmStore(geometry(budget_bytes=1 << 40), spare_bytes=0) as store:
        store.prepare_write(1, 0, 128)
        column(store, 1, 128).fill_(3)
        room = 100 * PAGE
        hog = torch.empty(free() - room, dtype=torch.uint8, device="cuda")
        assert store.obtainable_pages() < 300
        with pytest.raises(StoreFullError) as caught:
            store.prepare_write(2, 0, 128 * 400)
        print(f"\n{caught.value}")
        assert caught.value.pages == 400
        assert store.settle(10)
        store.prepare_write(2, 0, 128 * 10)
        del hog  # torch keeps it cached: the store asks for it
        store.prepare_write(2, 0, 128 * 400)
        assert store.committed_pages == 1 + 1 + 400
        assert float(column(store, 1, 128).sum(dtype=torch.float64)) == 3 * 128 * 2 * HEADS * SIZE
        assert total(store, 2, 128 * 400) == 0
    torch.cuda.empty_cache()


def test_device_errors_name_call_and_size(store: CudaVmmStore) -> None:
    driver = store._driver
    with pytest.raises(StoreError, match=r"cuMemCreate of 12345 bytes failed: CUDA_ERROR_INVALID"):
        driver.create(12345)
    with pytest.raises(StoreFullError, match=r"cuMemCreate of .* CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(1 << 41)
    with pytest.raises(StoreError, match=r"page_size is 65536; .* a multiple of 2097152"):
        CudaVmmStore(geometry(page_size=65536))


# --- bytes


def test_bytes_of_one_life_are_zero_in_the_next(store: CudaVmmStore) -> None:
    rows = 128 * 21
    for life in range(4):
        store.prepare_write(1, 0, rows)
        assert total(store, 1, rows) == 0
        for layer in store.geometry.layers:
            column(store, 1, rows, layer).fill_(float("nan"))
        delay(0.05)  # so that the keeper does not take the pages away first
        store.release(1)
        if life == 1:
            torch.cuda.synchronize()
            assert store.settle(10)
    assert store.stats().reused_pages > 0


def test_rows_can_be_written_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        store = CudaVmmStore(geometry())
        store.prepare_write(1, 0, 10)
        view = store.layer_view("l1")
    view[3, 1] = 2
    with torch.inference_mode():
        view[4, 1] = 3
    assert total(store, 1, 10) == 5 * 2 * HEADS * SIZE
    store.close()


@pytest.mark.parametrize("taker", [1, 2], ids=["same column", "other column"])
def test_freeing_behind_a_running_kernel_leaves_its_output_alone(taker: int) -> None:
    pages = 20
    rows = 128 * pages
    tight = geometry(budget_bytes=(pages + 2) * PAGE)
    with CudaVmmStore(tight, spare_bytes=0) as store:
        for _ in range(2 if SMALL else 5):
            store.prepare_write(1, 0, rows)
            column(store, 1, rows).fill_(7)
            running = delay(0.05)
            out = column(store, 1, rows).clone()
            store.release(1)
            store.prepare_write(taker, 0, rows)  # its pages are the only ones
            zeros = column(store, taker, rows).sum(dtype=torch.float64)
            torch.cuda.synchronize()
            assert running.query()
            assert bool((out == 7).all())
            assert float(zeros) == 0
            store.release(taker)
        assert store.resident_bytes() <= (pages + 2) * PAGE


def test_memory_can_be_mapped_while_kernels_run(store: CudaVmmStore) -> None:
    store.prepare_write(1, 0, 1)
    torch.cuda.synchronize()
    running = delay(0.5)
    store.prepare_write(1, 1, 128 * 85)
    assert not running.query()
    assert total(store, 1, 128 * 85) == 0


def test_a_graph_captured_earlier_sees_pages_mapped_later(store: CudaVmmStore) -> None:
    store.prepare_write(1, 0, 1)
    rows = store.layer_view("l2")[:, 1]
    out = torch.zeros_like(rows[0])
    torch.add(rows[0], 1, out=out)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured, not run: the row is not mapped yet
        torch.add(rows[5000], 1, out=out)
    store.prepare_write(1, 1, 5001)
    graph.replay()
    assert bool((out == 1).all())
    rows[5000] = 3
    graph.replay()
    assert bool((out == 4).all())
    store.release(1)
    torch.cuda.synchronize()
    assert store.settle(10)
    store.prepare_write(1, 0, 5001)  # other pages
    graph.replay()
    assert bool((out == 1).all())


def test_the_keeper_does_not_spoil_a_capture(
    store: CudaVmmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for events, unmaps and frees in its own thread meanwhile."""
    monkeypatch.setattr(CudaVmmStore, "POLL_SECONDS", 0.3)  # so that it finds its work within
    store.prepare_write(1, 0, 128 * 21)
    store.prepare_write(2, 0, 128)
    rows = column(store, 2, 128)
    rows.add_(0)  # loads the kernel
    delay(0.05)
    store.release(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.add_(1)
        before = store.idle_pages
        time.sleep(0.6)
        after = store.idle_pages
        rows.add_(1)
    print(f"\nidle pages before and after: {before}, {after}")
    assert after == (0, 0)
    graph.replay()
    assert bool((rows == 2).all())


def test_the_store_follows_the_callers_stream(store: CudaVmmStore) -> None:
    store.prepare_write(1, 0, 128 * 64)
    column(store, 1, 128 * 64).fill_(5)
    delay(0.05)
    store.release(1)
    store.prepare_write(1, 0, 128 * 64)  # zeroed behind the delay, on this stream
    assert store.stats().reused_pages == 64
    with torch.cuda.stream(torch.cuda.Stream()):
        store.prepare_write(1, 0, 128 * 64)  # says which stream comes next
        assert float(column(store, 1, 128 * 64).sum(dtype=torch.float64)) == 0


def test_an_allocation_is_mapped_as_a_whole_or_not_at_all(store: CudaVmmStore) -> None:
    driver = store._driver
    address, extent = driver.reserve(2 * PAGE, PAGE), driver.create(2 * PAGE)
    try:
        with pytest.raises(StoreError, match=f"cuMemMap of {PAGE} bytes failed: CUDA_ERROR_NOT_S"):
            driver.map(address, PAGE, extent)
    finally:
        driver.release(extent)
        driver.free(address, 2 * PAGE)


def test_columns_share_pages_and_never_write_them(store: CudaVmmStore) -> None:
    """Allocations at several addresses, copies under queued kernels, the way back."""
    pages, rows = 85, 128 * 85 - 7  # 64 16 4 1
    inside, back, again = 128 * 70, 128 * 40, 128 * 60  # in the second extent, in the first
    store.prepare_write(1, 0, rows)
    for layer in store.geometry.layers:
        column(store, 1, rows, layer).fill_(3)
    before = free()
    store.clone(1, 2, rows)
    store.clone(2, 3, inside)  # shares 64 pages and copies 6
    store.clone(3, 4, inside)
    assert store.committed_pages == 1 + pages + 1 + 6
    assert before - free() <= 7 * PAGE + SLACK
    for col, n in ((2, rows), (3, inside), (4, inside)):
        assert total(store, col, n) == 3 * n * 2 * HEADS * SIZE * 4
    delay(0.05)
    out = column(store, 3, inside).clone()
    store.shrink(3, back)
    store.prepare_write(3, back, again)
    assert store.committed_pages == 1 + pages + 1 + 6 + 60
    assert not column(store, 3, again)[back:].any()
    column(store, 3, again)[back:].fill_(float("nan"))
    assert bool((out == 3).all())
    for end in (0, 128 * 10):  # and whole, in place of the other columns' pages
        store.prepare_write(2, end, rows)
        for layer in store.geometry.layers:
            column(store, 2, rows, layer)[end:].fill_(5 if end else float("nan"))
    for col, n in ((1, rows), (3, back), (4, inside)):
        assert total(store, col, n) == 3 * n * 2 * HEADS * SIZE * 4
    out = column(store, 1, rows).clone()
    for col in (1, 2, 3, 4):
        store.release(col)
    torch.cuda.synchronize()
    assert store.settle(10)
    assert bool((out == 3).all())
    assert store.resident_bytes() == PAGE


# --- time


@pytest.mark.parametrize("past", [5, 16 * 64 - 5], ids=["at an extent's end", "inside an extent"])
def test_a_clone_of_1024_pages_takes_milliseconds_and_one_extents_copy(past: int) -> None:
    pages = 128 if SMALL else 1024  # 16 rows each
    whole = 16 * (pages - 64)  # rows of all extents but the last
    copied, rows = -(-past // 16), whole + past
    with CudaVmmStore(geometry(32, capacity=16 * 1024), spare_bytes=0) as store:
        for start in range(0, 16 * pages, 2048):  # a prompt in chunks
            store.prepare_write(1, start, start + 2048)
        for layer in store.geometry.layers:
            column(store, 1, rows, layer).fill_(1)
        host, device = [], []
        for _ in range(9):
            before = free()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            delay(0.02)  # so that between the events the device only works and never waits
            marks[0].record()
            began = time.perf_counter()
            store.clone(1, 2, rows)
            host.append((time.perf_counter() - began) * 1e3)
            marks[1].record()
            taken = before - free()
            device.append(marks[0].elapsed_time(marks[1]))
            assert store.committed_pages == 1 + pages + copied
            assert taken <= copied * PAGE + SLACK
            assert bool((column(store, 2, rows, "l31") == 1).all())
            store.clone(2, 3, rows)  # has all but the partial page in common with the clone
            assert store.committed_pages == 1 + pages + copied + 1
            assert bool((column(store, 3, rows, "l31") == 1).all())
            store.release_all((2, 3))
            torch.cuda.synchronize()
            assert store.settle(10)
        print(
            f"\n{pages} pages cloned, ms of the host {[round(x, 2) for x in host]}, of the device "
            f"{[round(x, 3) for x in device]}; {store.stats()}"
        )
        if not SMALL:
            assert statistics.median(host[2:]) < 5
            assert statistics.median(device[2:]) < 1


def test_a_prompt_of_512_pages_grows_within_milliseconds() -> None:
    pages = 64 if SMALL else 512
    medians = {}
    for name, spare in (("created", 0), ("recycled", 4 << 30)):
        with CudaVmmStore(geometry(32, capacity=16 * 1024), spare_bytes=spare) as store:
            times = []
            for _ in range(9):
                torch.cuda.synchronize()
                began = time.perf_counter()
                store.prepare_write(1, 0, 16 * pages)
                times.append((time.perf_counter() - began) * 1e3)
                store.release(1)
                torch.cuda.synchronize()
                assert store.settle(10)
            medians[name] = statistics.median(times[2:])
            stats = store.stats()
            print(f"\n{name}: {pages} pages in ms {[round(x, 2) for x in times]}, {stats}")
    print(f"medians {medians}")
    if not SMALL:
        assert max(medians.values()) < 5


@pytest.mark.parametrize("ahead", [0, 16], ids=["without the keeper", "with the keeper"])
def test_steady_decode_costs_the_caller_little(ahead: int) -> None:
    cols, steps, step_seconds = (16, 20, 0.005) if SMALL else (256, 100, 0.01)
    wide = geometry(32, max_seqs=cols, capacity=4096, ahead_rows=ahead)
    with CudaVmmStore(wide) as store:
        lengths = {col: 200 + 7 * col % 97 for col in range(1, cols + 1)}
        store.prepare_writes({col: (0, n) for col, n in lengths.items()})
        torch.cuda.synchronize()
        spent, began = [], time.perf_counter()
        for _ in range(steps):
            start = time.perf_counter()
            store.prepare_writes({col: (n, n + 1) for col, n in lengths.items()})
            lengths = {col: n + 1 for col, n in lengths.items()}
            if ahead:
                store.prepare_ahead(lengths)
            spent.append(time.perf_counter() - start)
            done = delay(step_seconds)
            done.synchronize()
        whole = time.perf_counter() - began
        share = sum(spent) / whole
        print(
            f"\n{cols} columns, step {whole / steps * 1e3:.2f} ms: caller {share:.2%}, median "
            f"{statistics.median(spent) * 1e6:.0f} us, worst {max(spent) * 1e6:.0f} us; "
            f"{store.stats()}"
        )
        assert store.settle(10)
        expected = wide.scratch_pages + sum(wide.pages_for(n) for n in lengths.values())
        assert store.committed_pages <= expected
        if ahead and not SMALL:
            assert share < 0.03


# --- threads


def test_one_thread_changes_columns_while_another_computes_on_others(store: CudaVmmStore) -> None:
    rows = 128 * 3 + 5
    steady = (1, 2, 3)
    for col in steady:
        store.prepare_write(col, 0, rows)
        for layer in store.geometry.layers:
            column(store, col, rows, layer).fill_(col)
    torch.cuda.synchronize()
    stop, failures = threading.Event(), []

    def change() -> None:
        turn, kept = 0, dict.fromkeys((4, 5, 6, 7), 0)
        try:
            while not stop.is_set():
                turn += 1
                for col in kept:
                    end = 1 + 977 * turn * col % (128 * 40)
                    store.prepare_write(col, 0, end)
                    store.prepare_ahead({col: min(end + 128, 64 * 1024)})
                    new = -(-kept[col] // 128) * 128  # whole pages are new
                    if bool(column(store, col, end)[new:].any()):
                        failures.append(f"rows {new} to {end} of column {col} are not all zero")
                    column(store, col, end).fill_(float("nan"))
                    kept[col] = end // 3
                    store.shrink(col, kept[col])
                    if (turn + col) % 2:
                        store.release(col)
                        kept[col] = 0
            for col in kept:
                store.release(col)
        except BaseException as error:
            failures.append(repr(error))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        until = time.monotonic() + (3 if SMALL else 8)
        rounds = 0
        while time.monotonic() < until and not failures:
            for col in steady:
                expected = col * rows * 2 * HEADS * SIZE * len(store.geometry.layers)
                assert total(store, col, rows) == expected
            rounds += 1
    finally:
        stop.set()
        thread.join(60)
    print(f"\n{rounds} rounds, {store.stats()}")
    assert not failures and not thread.is_alive()
    assert store.settle(10)
    assert store.committed_pages == 1 + 3 * store.geometry.pages_for(rows)
