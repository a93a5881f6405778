"""The memory of a host store, as the operating system reports it."""

import gc
import mmap
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    FlatPolicy,
    HostStore,
    LayerGroup,
    RingPolicy,
    StoreError,
)
from vllm_kv_columns.kv_manager.stores import libc

from .builders import PAGE, config, flat_group, holds, is_zero, write

LARGE_PAGE = 256 * 1024
# A small model: 12 flat layers of 3 heads and 10 ring layers, bfloat16, up to 4000 tokens.
CONFIG = CacheConfig(
    max_seqs=16,
    capacity=4000,
    max_write=256,
    groups=(
        LayerGroup("flat", tuple(f"f{i}" for i in range(12)), FlatPolicy(), 3, 64, "bfloat16"),
        LayerGroup("ring", tuple(f"r{i}" for i in range(10)), RingPolicy(512), 3, 64, "bfloat16"),
    ),
    page_size=LARGE_PAGE,
    budget_bytes=1 << 30,
)
GEOMETRY = CacheGeometry.of(CONFIG)


@pytest.fixture
def store() -> Iterator[HostStore]:
    with HostStore(GEOMETRY) as made:
        yield made


def mapped(store: HostStore) -> tuple[int, int]:
    """Resident bytes from /proc/self/smaps: (of mapped pages, of reserved addresses)."""
    spans = []
    for region in GEOMETRY.regions:
        base = store.layer_view(region.layers[0]).data_ptr()
        spans.append((base, base + region.nbytes))
    backed = reserved = 0
    inside = is_file = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = any(low <= start and end <= high for low, high in spans)
            is_file = "memfd:kv_columns" in line
        elif inside and first == "Rss:":
            size = int(line.split()[1]) * 1024
            backed, reserved = backed + size * is_file, reserved + size * (not is_file)
    return backed, reserved


def live_bytes(lengths: dict[int, int]) -> int:
    return sum(
        min(length, region.rows) * region.row_bytes
        for length in lengths.values()
        for region in GEOMETRY.regions
    )


def touch(store: HostStore, col: int, length: int) -> None:
    for layer in GEOMETRY.layers:
        rows = GEOMETRY.region_of(layer).rows
        store.layer_view(layer)[: min(length, rows), col] = 1


def test_a_reservation_costs_the_scratch_column_alone(store: HostStore) -> None:
    assert sum(region.nbytes for region in GEOMETRY.regions) > 10 * 16 * LARGE_PAGE
    assert store.committed_pages == 2
    assert store.resident_bytes() == 2 * LARGE_PAGE


def test_memory_follows_tokens_within_five_percent_and_a_page_per_sequence_and_group(
    store: HostStore,
) -> None:
    lengths: dict[int, int] = {}
    for col, length in enumerate([1, 63, 111, 500, 767, 768, 1201, 3999], start=1):
        store.prepare_write(col, max(0, length - 200), length)
        touch(store, col, length)
        lengths[col] = length
        bound = 1.05 * live_bytes(lengths) + (len(lengths) + 1) * 2 * LARGE_PAGE
        assert live_bytes(lengths) < store.resident_bytes() <= bound
        assert store.resident_bytes() == store.committed_pages * LARGE_PAGE
    backed, reserved = mapped(store)
    assert live_bytes(lengths) <= backed <= store.resident_bytes()
    assert reserved == 0


def test_release_gives_all_of_it_back_at_once(store: HostStore) -> None:
    for col in (1, 2, 3):
        store.prepare_write(col, 0, 1500)
        touch(store, col, 1500)
    before = store.resident_bytes()
    store.release(2)
    pages = GEOMETRY.pages_for(1500)
    assert store.resident_bytes() == before - pages * LARGE_PAGE
    for col in (1, 3):
        store.release(col)
    assert store.resident_bytes() == 2 * LARGE_PAGE
    assert mapped(store)[0] <= 2 * LARGE_PAGE


def test_reading_rows_that_are_not_backed_gives_zeros_and_commits_nothing(
    store: HostStore,
) -> None:
    store.prepare_write(1, 0, 3)
    touch(store, 1, 3)
    before = store.resident_bytes()
    for layer in ("f0", "f11", "r9"):
        view = store.layer_view(layer)
        assert float(view[:, 1].float().sum()) == 3 * 2 * 3 * 64
        assert not view[:, 2].any()
    assert store.resident_bytes() == before
    assert store.committed_pages * LARGE_PAGE == before
    backed, reserved = mapped(store)
    assert backed <= before
    assert reserved == 0


def test_shared_pages_are_counted_once_and_freed_by_their_last_holder(store: HostStore) -> None:
    store.prepare_write(1, 0, 700)
    touch(store, 1, 700)
    before = store.resident_bytes()
    for clone in (2, 3):
        store.clone(1, clone, 700)
    assert store.resident_bytes() == before
    assert float(store.layer_view("f3")[:700, 3].float().mean()) == 1
    store.prepare_write(2, 700, 701)  # a copy of the last page of each group
    assert store.resident_bytes() == before + 2 * LARGE_PAGE
    store.release(1)
    assert store.resident_bytes() == before + 2 * LARGE_PAGE
    store.release(3)
    assert store.resident_bytes() == before
    store.release(2)
    assert store.resident_bytes() == 2 * LARGE_PAGE


def test_a_rewind_gives_whole_pages_back(store: HostStore) -> None:
    store.prepare_write(1, 0, 700)
    store.shrink(1, 100)
    assert store.resident_bytes() == (2 + GEOMETRY.pages_for(100)) * LARGE_PAGE


def test_a_growing_column_stays_one_mapping(store: HostStore) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kv_columns:flat")

    for position in range(0, 1600, 20):
        store.prepare_write(1, position, position + 20)
        store.prepare_write(4, position, position + 20)
    assert store.committed_pages > 40
    assert mappings() == 3  # the scratch column and these two


def test_many_lives_of_a_column_leave_nothing_behind(store: HostStore) -> None:
    for length in range(1, 900, 45):
        store.prepare_write(1, 0, length)
        store.clone(1, 2, length)
        store.prepare_write(2, length, length + 1)
        store.release(1)
        store.release(2)
    assert store.resident_bytes() == 2 * LARGE_PAGE
    assert store.committed_pages == 2


def test_close_frees_the_pages_and_late_readers_see_zeros() -> None:
    store = HostStore(GEOMETRY)
    store.prepare_write(1, 0, 10)
    touch(store, 1, 10)
    view = store.layer_view("f0")
    address = view.data_ptr()
    store.close()
    assert not view[:, 1].any()
    assert is_reserved(address)
    del view
    gc.collect()
    assert not is_reserved(address)


def test_a_store_that_is_dropped_without_close_leaves_no_mapping() -> None:
    store = HostStore(GEOMETRY)
    address = store.layer_view("f0").data_ptr()
    assert is_reserved(address)
    del store
    gc.collect()
    assert not is_reserved(address)


def is_reserved(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False


WRITE_BEYOND = """
import faulthandler, sys
faulthandler.disable()
sys.path.insert(0, {root!r})
from tests.kv_manager.test_host_memory import GEOMETRY, HostStore
store = HostStore(GEOMETRY)
store.prepare_write(1, 0, 3)
view = store.layer_view("f0")
view[2, 1] = 1
print("inside", flush=True)
view[{row}, 1] = 1
print("beyond", flush=True)
"""


def test_a_write_beyond_the_backed_pages_faults() -> None:
    region = GEOMETRY.regions[0]
    row = region.rows_within(region.pages_for(3)) + 1
    code = WRITE_BEYOND.format(root=str(Path(__file__).parents[2]), row=row)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("inside\n", -signal.SIGSEGV)


def test_a_file_that_may_not_grow_is_an_error_that_names_call_and_limit() -> None:
    store = HostStore(GEOMETRY)
    store.prepare_write(1, 0, 20)
    touch(store, 1, 20)
    before = store.committed_pages
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE_PAGE, hard))
    try:
        with pytest.raises(StoreError, match=r"fallocate of \d+ bytes failed: EFBIG.*ulimit -f"):
            store.prepare_write(1, 0, 900)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.committed_pages == before
    assert store.resident_bytes() == before * LARGE_PAGE
    assert float(store.layer_view("f5")[:20, 1].float().mean()) == 1
    store.prepare_write(1, 0, 900)
    store.close()


def test_more_addresses_than_there_are_is_an_error_that_names_the_limits() -> None:
    geometry = CacheGeometry.of(config(flat_group(), max_seqs=1000, capacity=10**9))
    with pytest.raises(StoreError, match=r"mmap \(reservation\) of \d+ .* ENOMEM.*lower max_seqs"):
        HostStore(geometry)


@pytest.mark.parametrize("failing", ["map_file", "allocate"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_refusal_half_way_leaves_columns_readable_and_pages_counted(
    monkeypatch: pytest.MonkeyPatch, failing: str, after: int
) -> None:
    """The call fails at its third region at the latest; three regions grow or copy."""
    with HostStore(CacheGeometry.of(config())) as store:
        store.prepare_write(1, 0, 7)
        for position in range(7):
            write(store, 1, position, 100 * position)
        store.clone(1, 2, 7)
        real = getattr(libc, failing)
        calls = 0

        def fail(*args: int) -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise StoreError(f"{failing} failed: no more")
            real(*args)

        monkeypatch.setattr(libc, failing, fail)
        with pytest.raises(StoreError, match="no more"):
            store.prepare_write(2, 7, 8)
        with pytest.raises(StoreError, match="no more"):
            store.prepare_write(3, 0, 9)
        monkeypatch.undo()
        assert store.resident_bytes() == store.committed_pages * PAGE
        store.prepare_write(2, 7, 8)
        write(store, 2, 7, 5)
        assert all(holds(store, col, p, 100 * p) for col in (1, 2) for p in range(7))
        for col in (1, 2, 3):
            store.release(col)
        assert store.resident_bytes() == store.committed_pages * PAGE == 3 * PAGE


def test_a_clone_that_cannot_be_mapped_leaves_its_column_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostStore(CacheGeometry.of(config())) as store:
        store.prepare_write(1, 0, 7)
        write(store, 1, 6, 4)
        real, calls = libc.map_file, 0

        def fail(*args: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise StoreError("mmap failed")
            real(*args)

        monkeypatch.setattr(libc, "map_file", fail)
        with pytest.raises(StoreError, match="mmap failed"):
            store.clone(1, 2, 7)
        monkeypatch.undo()
        assert is_zero(store, 2)
        store.clone(1, 2, 7)
        assert holds(store, 2, 6, 4)
        store.release(1)
        store.release(2)
        assert store.resident_bytes() == store.committed_pages * PAGE == 3 * PAGE


def test_a_page_size_below_the_systems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    with pytest.raises(StoreError, match=r"page_size is 4096; .* must be a multiple of 65536"):
        HostStore(CacheGeometry.of(config()))


def test_a_system_without_memfd_is_told_of_the_other_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(StoreError, match="memfd is not available on darwin; use the store 'dense'"):
        HostStore(GEOMETRY)


def test_views_of_a_region_share_one_stretch_of_addresses(store: HostStore) -> None:
    views = [store.layer_view(layer) for layer in GEOMETRY.regions[0].layers]
    starts = [view.data_ptr() for view in views]
    assert starts == list(range(starts[0], starts[0] + 12 * 768, 768))
    assert isinstance(views[0], torch.Tensor) and not views[0].is_inference()
