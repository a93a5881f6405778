"""What all stores promise, and where they differ."""

from collections.abc import Iterator

import pytest
import torch

from vllm_kv_columns.kv_manager import (
    CacheGeometry,
    ColumnStore,
    ConfigError,
    DenseStore,
    HostStore,
    StoreError,
    StoreFullError,
)

from .builders import (
    PAGE,
    STORES,
    SmallDenseStore,
    config,
    flat_group,
    holds,
    is_zero,
    read,
    ring_group,
    write,
)

GEOMETRY = CacheGeometry.of(config())


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[ColumnStore]:
    with STORES[request.param](GEOMETRY) as made:
        yield made


@pytest.fixture
def host() -> Iterator[HostStore]:
    with HostStore(GEOMETRY) as made:
        yield made


@pytest.fixture
def dense() -> Iterator[DenseStore]:
    with SmallDenseStore(GEOMETRY) as made:
        yield made


def fill(store: ColumnStore, col: int, start: int, end: int, base: float = 0) -> None:
    """Write positions [start, end) of a column, each with base + 100 x position."""
    for position in range(start, end):
        store.prepare_write(col, position, position + 1)
        write(store, col, position, base + 100 * position)


def test_views_have_the_shape_that_kernels_take(store: ColumnStore) -> None:
    store.prepare_write(2, 0, 41)
    assert store.layer_view("flat.1").shape == (41, 5, 2, 3, 20)
    assert store.layer_view("ring5.0").shape == (8, 5, 2, 3, 100)
    assert store.layer_view("flat.1").dtype == torch.float32


def test_host_views_are_strided_over_one_region_and_never_move(host: HostStore) -> None:
    first, second = host.layer_view("flat.0"), host.layer_view("flat.1")
    assert first.stride() == second.stride() == GEOMETRY.regions[0].strides
    assert second.data_ptr() - first.data_ptr() == 2 * 3 * 20 * 4
    fill(host, 3, 0, 41)
    assert host.layer_view("flat.0").data_ptr() == first.data_ptr()
    assert float(first[40, 3, 0, 0, 0]) == 4000
    assert host.stable_views and host.per_column


def test_dense_views_are_in_the_seed_order_and_grow_by_whole_rows(dense: DenseStore) -> None:
    assert dense.layer_view("flat.0").shape == (1, 5, 2, 3, 20)
    fill(dense, 3, 0, 5)
    assert dense.layer_view("flat.0").shape == (6, 5, 2, 3, 20)  # in steps of three
    assert dense.layer_view("flat.0").is_contiguous()
    assert not dense.stable_views and not dense.per_column


def test_two_bytes_a_number_work_too() -> None:
    geometry = CacheGeometry.of(config(flat_group(dtype="bfloat16"), ring_group(5)))
    for cls in STORES.values():
        with cls(geometry) as store:
            store.prepare_write(1, 0, 7)
            view = store.layer_view("flat.1")
            view[6, 1] = 1.5
            assert view.dtype == torch.bfloat16
            assert float(view[:7, 1].sum()) == 1.5 * 2 * 3 * 20


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
@pytest.mark.parametrize("cls", STORES.values(), ids=STORES)
def test_rows_can_be_written_in_and_out_of_inference_mode(
    cls: type[ColumnStore], inside: bool
) -> None:
    with torch.inference_mode(inside):
        store = cls(GEOMETRY)
        store.prepare_write(1, 0, 9)
        view = store.layer_view("flat.0")
    with torch.inference_mode(not inside):
        view[3, 1] = 7.0
        store.prepare_write(1, 9, 20)
    assert holds_value(store, 7.0)
    store.close()


def holds_value(store: ColumnStore, value: float) -> bool:
    return bool((read(store, "flat.0", 1, 3) == value).all())


def test_a_column_reads_as_zeros_when_new_and_when_taken_again(store: ColumnStore) -> None:
    store.prepare_write(1, 0, 20)
    assert is_zero(store, 1)
    fill(store, 1, 0, 20)
    store.release(1)
    assert is_zero(store, 1)
    store.prepare_write(1, 0, 41)
    assert is_zero(store, 1)


def test_rows_given_back_by_a_rewind_are_zero_when_they_come_again(store: ColumnStore) -> None:
    fill(store, 1, 0, 8)
    fill(store, 2, 0, 8, base=5)
    store.shrink(1, 0)
    store.prepare_write(1, 0, 8)
    assert is_zero(store, 1)
    assert all(holds(store, 2, p, 5 + 100 * p) for p in range(8))


def test_a_rewound_and_released_column_hides_everything(store: ColumnStore) -> None:
    """Rows above the rewound length must not come back in the column's next life."""
    fill(store, 2, 0, 8)  # keeps a dense store long
    fill(store, 1, 0, 8)
    store.shrink(1, 3)
    store.release(1)
    store.prepare_write(1, 0, 8)
    assert is_zero(store, 1)


def test_columns_do_not_touch_each_other(store: ColumnStore) -> None:
    for col in (1, 2, 4):
        fill(store, col, 0, 8, base=10_000 * col)
    store.release(2)
    for col in (1, 4):
        assert all(holds(store, col, p, 10_000 * col + 100 * p) for p in range(8))
    assert is_zero(store, 2) and is_zero(store, 3)


def test_a_clone_holds_the_rows_of_its_source(store: ColumnStore) -> None:
    fill(store, 1, 0, 8)
    store.clone(1, 3, 6)
    assert all(holds(store, 3, p, 100 * p) for p in range(6))


def test_a_clone_lives_on_when_its_source_is_released_and_used_anew(store: ColumnStore) -> None:
    fill(store, 1, 0, 12)
    store.clone(1, 3, 12)
    store.release(1)
    fill(store, 1, 0, 12, base=7)
    assert all(holds(store, 3, p, 100 * p) for p in range(7, 12))
    store.release(3)
    assert all(holds(store, 1, p, 7 + 100 * p) for p in range(7, 12))


@pytest.mark.parametrize("writer", [1, 3], ids=["source writes", "clone writes"])
def test_a_write_after_a_clone_is_seen_by_the_writer_alone(store: ColumnStore, writer: int) -> None:
    fill(store, 1, 0, 7)
    store.clone(1, 3, 7)
    fill(store, writer, 7, 12, base=3)
    other = 4 - writer
    assert all(holds(store, writer, p, 3 + 100 * p) for p in range(7, 12))
    assert all(holds(store, other, p, 100 * p) for p in range(7))
    fill(store, other, 7, 12, base=6)
    assert all(holds(store, writer, p, 3 + 100 * p) for p in range(7, 12))
    assert all(holds(store, other, p, 6 + 100 * p) for p in range(7, 12))


@pytest.mark.parametrize("writer", [1, 3], ids=["source writes", "clone writes"])
@pytest.mark.parametrize("start", [15, 22], ids=["one run of slots", "over the end of both rings"])
def test_a_write_into_a_shared_ring_leaves_the_other_what_it_held(
    store: ColumnStore, start: int, writer: int
) -> None:
    fill(store, 1, 0, start)
    store.clone(1, 3, start)
    store.prepare_write(writer, start, start + 4)
    for position in range(start, start + 4):
        write(store, writer, position, 50 + position)
    assert all(holds(store, writer, p, 50 + p) for p in range(start, start + 4))
    assert all(holds(store, 4 - writer, p, 100 * p) for p in range(start - 8, start))


@pytest.mark.parametrize("writer", [1, 3], ids=["source goes back", "clone goes back"])
def test_a_sequence_that_goes_back_and_on_leaves_the_other_its_rows(
    store: ColumnStore, writer: int
) -> None:
    fill(store, 1, 0, 7)
    store.clone(1, 3, 7)
    fill(store, writer, 7, 8, base=1)
    store.shrink(writer, 2)
    fill(store, writer, 2, 8, base=9)
    assert all(holds(store, 4 - writer, p, 100 * p) for p in range(7))
    assert all(holds(store, writer, p, 100 * p) for p in range(2))
    assert all(holds(store, writer, p, 9 + 100 * p) for p in range(2, 8))


@pytest.mark.parametrize("how", ["release", "shrink"])
def test_an_emptied_column_takes_its_pages_anew(store: ColumnStore, how: str) -> None:
    fill(store, 1, 0, 7)
    pages = store.committed_pages
    if how == "release":
        store.release(1)
    else:
        store.shrink(1, 0)
    assert store.committed_pages < pages
    assert store.pages_needed({1: (0, 7)}) == pages - store.committed_pages
    store.prepare_write(1, 0, 7)
    assert store.committed_pages == pages


def test_rows_given_up_by_a_rewind_cannot_be_cloned(store: ColumnStore) -> None:
    fill(store, 1, 0, 7)
    store.shrink(1, 3)
    with pytest.raises(StoreError, match="n_rows is 4, column 1 holds at most 3"):
        store.clone(1, 2, 4)
    store.shrink(1, 0)
    fill(store, 2, 0, 5)
    store.clone(2, 1, 5)
    assert all(holds(store, 1, p, 100 * p) for p in range(5))


def test_clones_of_clones_are_independent(store: ColumnStore) -> None:
    fill(store, 1, 0, 7)
    store.clone(1, 2, 7)
    store.clone(2, 3, 5)
    for col in (1, 2, 3):
        fill(store, col, 5, 8, base=1000 * col)
    for col in (1, 2, 3):
        assert all(holds(store, col, p, 100 * p) for p in range(5))
        assert all(holds(store, col, p, 1000 * col + 100 * p) for p in range(5, 8))


def test_pages_needed_is_what_the_writes_then_take(store: ColumnStore) -> None:
    fill(store, 1, 0, 13)
    store.clone(1, 2, 13)
    store.clone(1, 3, 13)
    for wants in ({1: (13, 17), 4: (0, 4)}, {1: (17, 19), 2: (13, 14), 3: (13, 16)}, {}):
        needed, before = store.pages_needed(wants), store.committed_pages
        assert store.pages_needed(wants) == needed
        assert store.committed_pages == before
        store.prepare_writes(wants)
        assert store.committed_pages == before + needed
        assert store.pages_needed(wants) == 0


def test_shrink_gives_back_whole_pages_and_keeps_live_rows(host: HostStore) -> None:
    fill(host, 1, 0, 8)  # flat: 2 pages, rings: 5 each
    before = host.committed_pages
    host.shrink(1, 4)  # flat: 1, rings: 3 each
    assert host.committed_pages == before - 1 - 2 - 2
    assert all(holds(host, 1, p, 100 * p) for p in range(4))
    host.shrink(1, 0)
    assert host.committed_pages == GEOMETRY.scratch_pages


@pytest.mark.parametrize(
    ("written", "length"), [(9, 5), (12, 8), (14, 10)], ids=["one row lost", "full", "beyond"]
)
def test_a_wrapped_ring_that_is_shrunk_or_cloned_keeps_what_it_still_needs(
    store: ColumnStore, written: int, length: int
) -> None:
    """The ring of 8 rows has wrapped, its window of 5 needs the last 4 positions."""
    fill(store, 1, 0, written)
    store.clone(1, 2, length)
    store.shrink(1, length)
    if isinstance(store, HostStore):
        pages = GEOMETRY.scratch_pages + GEOMETRY.pages_for(length)
        assert store.committed_pages == pages
    for col in (1, 2):
        assert all(holds(store, col, p, 100 * p) for p in range(length - 4, length))
    fill(store, 1, length, length + 4, base=3)
    fill(store, 2, length, length + 4, base=4)
    for col, base in ((1, 3), (2, 4)):
        assert all(holds(store, col, p, base + 100 * p) for p in range(length, length + 4))


def test_dense_memory_follows_the_longest_sequence(dense: DenseStore) -> None:
    at_start = dense.resident_bytes()
    assert at_start == 5 * sum(region.row_bytes for region in GEOMETRY.regions)
    fill(dense, 1, 0, 5)
    short = dense.resident_bytes()
    assert short == 6 * at_start
    fill(dense, 2, 0, 30)
    assert dense.resident_bytes() == 5 * (30 * 960 + (8 + 14) * 2400)
    dense.shrink(2, 29)
    dense.release(2)
    assert dense.resident_bytes() == short
    assert dense.committed_pages == -(-short // PAGE)
    dense.release(1)
    assert dense.resident_bytes() == at_start


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.release(0), "release: column is 0; sequences own columns 1 to 4"),
        (lambda s: s.release(5), "release: column is 5; sequences own columns 1 to 4"),
        (lambda s: s.clone(0, 1, 0), "clone: column is 0"),
        (lambda s: s.clone(1, 2, 8), "clone: n_rows is 8, column 1 holds at most 7"),
        (lambda s: s.clone(1, 4, 3), "clone: column 4 is in use; release it first"),
        (lambda s: s.shrink(9, 0), "shrink: column is 9"),
        (lambda s: s.shrink(1, -1), r"shrink: positions are \[0, -1\) in column 1"),
        (lambda s: s.prepare_write(-1, 0, 1), "prepare_write: column is -1; columns are 0 to 4"),
        (lambda s: s.prepare_write(1, 3, 2), r"positions are \[3, 2\) in column 1; they must lie"),
        (lambda s: s.prepare_write(1, 0, 42), r"\[0, 42\) in column 1; .* within \[0, 41\)"),
        (lambda s: s.prepare_write(0, 0, 2), r"\[0, 2\) in column 0; .* within \[0, 1\)"),
        (lambda s: s.prepare_writes({7: (0, 1)}), "prepare_write: column is 7"),
        (lambda s: s.pages_needed({1: (0, 99)}), r"pages_needed: positions are \[0, 99\)"),
    ],
)
def test_use_against_the_contract_is_refused_and_changes_nothing(
    store: ColumnStore, call: object, message: str
) -> None:
    fill(store, 1, 0, 7)
    store.prepare_write(4, 0, 1)
    before = store.committed_pages
    with pytest.raises(StoreError, match=message):
        call(store)  # type: ignore[operator]
    assert store.committed_pages == before
    assert all(holds(store, 1, p, 100 * p) for p in range(7))


def test_an_unknown_layer_is_refused(store: ColumnStore) -> None:
    with pytest.raises(ConfigError, match=r"layer 'flat.2' is not in the cache; its 4 layers are"):
        store.layer_view("flat.2")


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.layer_view("flat.0"),
        lambda s: s.pages_needed({1: (0, 1)}),
        lambda s: s.prepare_write(1, 0, 1),
        lambda s: s.release(1),
        lambda s: s.clone(1, 2, 0),
        lambda s: s.shrink(1, 0),
        lambda s: s.resident_bytes(),
    ],
    ids=["layer_view", "pages_needed", "prepare_write", "release", "clone", "shrink", "resident"],
)
def test_a_closed_store_says_so(store: ColumnStore, call: object) -> None:
    fill(store, 1, 0, 3)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store is closed; make a new one"):
        call(store)  # type: ignore[operator]


def test_a_dense_store_without_memory_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = SmallDenseStore(GEOMETRY)
    fill(dense, 1, 0, 3)

    def zeros(*shape: object, **options: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory\nstack")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        StoreError, match=r"no memory for 6 rows of 5 columns of region 'flat': can"
    ):
        dense.prepare_write(1, 3, 4)
    assert all(holds(dense, 1, p, 100 * p) for p in range(3))


@pytest.mark.parametrize("cls", [HostStore, STORES["cuda-vmm"]], ids=["host", "cuda-vmm"])
def test_a_limit_is_a_shortage_that_passes(cls: type[ColumnStore]) -> None:
    with cls(GEOMETRY) as store:
        fill(store, 1, 0, 7)
        assert store.page_limit == GEOMETRY.budget_pages
        store.limit_pages = limit = store.committed_pages + GEOMETRY.pages_for(7) + 1
        with pytest.raises(StoreFullError):
            store.prepare_writes({2: (0, 7), 3: (0, 7), 4: (0, 7)})
        assert store.pages_needed({2: (0, 7)}) == 0
        assert store.committed_pages <= limit
        assert store.obtainable_pages() == limit
        assert all(holds(store, 1, p, 100 * p) for p in range(7))
        store.release(1)
        store.prepare_write(3, 0, 7)
        assert is_zero(store, 3)
        store.limit_pages = None
        store.prepare_write(4, 0, 41)


@pytest.mark.parametrize("cls", [HostStore, STORES["cuda-vmm"]], ids=["host", "cuda-vmm"])
def test_rows_ahead_of_need_are_backed_with_the_rest_and_within_the_promise(
    cls: type[ColumnStore],
) -> None:
    geometry = CacheGeometry.of(config(ahead_rows=3))
    assert geometry.scratch_pages == GEOMETRY.scratch_pages
    with cls(geometry) as store:
        assert store.committed_pages == geometry.scratch_pages
        for end in range(1, 42):
            needed = store.pages_needed({1: (end - 1, end)})
            before = store.committed_pages
            store.prepare_write(1, end - 1, end)
            write(store, 1, end - 1, 100 * end)
            assert store.committed_pages == before + needed
            assert store.committed_pages - geometry.scratch_pages <= geometry.pages_for(end)
        store.clone(1, 2, 20)
        store.prepare_ahead({1: 41, 2: 23})
        assert store.pages_needed({2: (20, 21)}) + store.committed_pages <= (
            geometry.scratch_pages + 3 * geometry.pages_for(41)
        )
        assert all(holds(store, 1, p, 100 * (p + 1)) for p in range(33, 41))
        store.shrink(1, 35)
        assert holds(store, 1, 34, 3500)


def test_prepare_ahead_is_a_hint_that_a_store_may_ignore(store: ColumnStore) -> None:
    fill(store, 1, 0, 7)
    store.prepare_ahead({1: 9})
    store.prepare_write(1, 7, 9)
    assert all(holds(store, 1, p, 100 * p) for p in range(7))
    assert store.obtainable_pages() >= store.committed_pages
