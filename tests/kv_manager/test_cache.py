"""Sequences and the three-call step, by example. What random sequences find is in the machine."""

from collections.abc import Callable

import pytest

from vllm_kv_columns.kv_manager import (
    BatchedSequenceCache,
    CacheFullError,
    CacheGeometry,
    ColumnStore,
    ConfigError,
    HostStore,
    RewindError,
    Segment,
    StepError,
    StepOrderError,
    StoreError,
    UnknownColumnError,
)

from .builders import PAGE, STORES, config, flat_group, holds, make_cache, ring_group, step, write


@pytest.fixture(params=STORES)
def cache(request: pytest.FixtureRequest) -> BatchedSequenceCache:
    return make_cache(STORES[request.param])


def test_sequences_get_the_columns_after_the_scratch_column(cache: BatchedSequenceCache) -> None:
    assert [cache.seq_new() for _ in range(cache.max_seqs)] == [1, 2, 3, 4]
    assert cache.live_columns == (1, 2, 3, 4)
    cache.seq_rm(2)
    assert cache.free_columns == 1
    assert cache.seq_new() == 2


def test_a_fifth_sequence_is_refused_in_a_cache_of_four(cache: BatchedSequenceCache) -> None:
    for _ in range(4):
        cache.seq_new()
    for call in (cache.seq_new, lambda: cache.seq_clone(1)):
        with pytest.raises(CacheFullError, match=r"needs 1 column, 0 free; end one of the 4") as e:
            call()
        assert (e.value.needed, e.value.free, e.value.unit) == (1, 0, "columns")


def test_lengths_advance_at_commit_and_only_there(cache: BatchedSequenceCache) -> None:
    a, b = cache.seq_new(), cache.seq_new()
    cache.declare_step([a, a, a, b])
    assert (cache.pos(a), cache.pos(b)) == (0, 0)
    cache.prepare_step()
    assert (cache.pos(a), cache.pos(b)) == (0, 0)
    cache.commit_step()
    assert (cache.pos(a), cache.pos(b)) == (3, 1)
    cache.commit_step()
    assert (cache.pos(a), cache.pos(b)) == (3, 1)


def test_prepare_pads_and_repeats_its_answer(cache: BatchedSequenceCache) -> None:
    a = cache.seq_new()
    bare = cache.declare_step([a, a])
    assert bare.width == 2
    plan = cache.prepare_step(width=5)
    assert plan.seq_cols == (a, a, 0, 0, 0)
    assert plan.seq_info == (Segment(0, 2, a, 2),)
    assert cache.prepare_step() is plan
    assert cache.prepare_step(5) is plan
    with pytest.raises(StepError, match="width is 6, but the step is prepared with width 5"):
        cache.prepare_step(6)
    cache.commit_step()
    assert cache.pos(a) == 2


def test_a_width_that_is_too_small_leaves_the_step_declared(cache: BatchedSequenceCache) -> None:
    a = cache.seq_new()
    cache.declare_step([a, a, a])
    with pytest.raises(StepError, match="width is 2 but the step has 3 tokens"):
        cache.prepare_step(2)
    assert cache.prepare_step(3).num_tokens == 3


ORDER = {
    "idle": (
        lambda c: None,
        {
            "prepare_step": r"refused while no step is declared; call declare_step first",
            "commit_step": r"refused while no step is declared; call declare_step first",
            "abandon_step": r"refused while no step is declared; call declare_step first",
        },
    ),
    "declared": (
        lambda c: c.declare_step([1]),
        {
            call: r"refused while a step is declared but not prepared; call prepare_step next"
            for call in ("declare_step", "commit_step", "seq_new", "seq_rm", "seq_clone", "rewind")
        },
    ),
    "prepared": (
        lambda c: (c.declare_step([1]), c.prepare_step()),
        {
            call: r"refused while a step is prepared but not committed; call commit_step next"
            for call in ("declare_step", "seq_new", "seq_rm", "seq_clone", "rewind")
        },
    ),
    "committed": (
        lambda c: (c.declare_step([1]), c.prepare_step(), c.commit_step()),
        {
            "prepare_step": r"refused while the last step is committed; call declare_step first",
            "abandon_step": r"refused while the last step is committed; call declare_step first",
        },
    ),
}
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "declare_step": ([1],),
    "seq_rm": (1,),
    "seq_clone": (1,),
    "rewind": (1, 0),
}


@pytest.mark.parametrize(
    ("state", "call"), [(state, call) for state, (_, calls) in ORDER.items() for call in calls]
)
def test_a_call_out_of_order_names_the_state_and_the_way_on(
    cache: BatchedSequenceCache, state: str, call: str
) -> None:
    cache.seq_new()
    step(cache, 1, times=3)
    if state == "idle":
        cache.declare_step([1])
        cache.abandon_step()
    reach: Callable[[BatchedSequenceCache], object] = ORDER[state][0]
    reach(cache)
    before = (cache.pos(1), cache.used_pages, cache.live_columns)
    with pytest.raises(StepOrderError, match=f"^{call} is {ORDER[state][1][call]}"):
        getattr(cache, call)(*ARGUMENTS.get(call, ()))
    assert (cache.pos(1), cache.used_pages, cache.live_columns) == before
    if state == "declared":
        cache.prepare_step()
    if state in ("declared", "prepared"):
        cache.commit_step()
        assert cache.pos(1) == 4


def test_a_first_commit_without_a_step_is_out_of_order() -> None:
    with pytest.raises(StepOrderError, match="commit_step is refused while no step is declared"):
        make_cache().commit_step()


def test_an_abandoned_step_gives_its_pages_back(cache: BatchedSequenceCache) -> None:
    a = cache.seq_new()
    step(cache, a)
    before = cache.used_pages
    cache.declare_step([a] * 4)
    cache.abandon_step()
    cache.declare_step([a] * 4)
    cache.prepare_step()
    assert cache.used_pages > before
    cache.abandon_step()
    assert (cache.pos(a), cache.used_pages) == (1, before)
    cache.declare_step([a])


def test_an_abandoned_step_costs_a_ring_the_rows_it_wrote_over() -> None:
    cache = make_cache(cfg=config(ring_group(5)))
    a = cache.seq_new()
    step(cache, a, times=12)
    assert cache.floor(a) == 12 - (8 - 5 + 1)
    cache.declare_step([a] * 3)
    cache.abandon_step()
    assert cache.floor(a) == 8
    cache.declare_step([a] * 3)
    cache.prepare_step()
    cache.abandon_step()
    assert (cache.pos(a), cache.floor(a)) == (12, 15 - (8 - 5 + 1))


def test_rewinding_twice_does_not_go_below_what_the_rows_hold() -> None:
    cache = make_cache(cfg=config(ring_group(5)))
    a = cache.seq_new()
    step(cache, a, times=20)
    assert cache.floor(a) == 16
    cache.rewind(a, 16)
    assert cache.floor(a) == 16
    with pytest.raises(RewindError, match=r"rewind: length is 15, .* the floor is 16"):
        cache.rewind(a, 15)
    step(cache, a, times=2)
    assert (cache.pos(a), cache.floor(a)) == (18, 16)


def test_a_ring_that_has_not_wrapped_goes_back_to_nothing() -> None:
    cache = make_cache(cfg=config(ring_group(5)))
    a = cache.seq_new()
    step(cache, a, times=8)
    cache.rewind(a, 0)
    step(cache, a, times=8)
    assert cache.floor(a) == 0
    step(cache, a)
    assert cache.floor(a) == 5


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (10, "length is 10, but column 1 holds 9 tokens; give a length of at most 9"),
        (4, "length is 4, but rings of column 1 .* the floor is 5: give a length of at least"),
    ],
    ids=["above the length", "below the floor"],
)
def test_rewind_and_clone_refuse_what_is_not_held(
    cache: BatchedSequenceCache, n: int, message: str
) -> None:
    a = cache.seq_new()
    step(cache, a, times=9)
    with pytest.raises(RewindError, match=f"rewind: {message}"):
        cache.rewind(a, n)
    with pytest.raises(RewindError, match=f"seq_clone: {message}"):
        cache.seq_clone(a, n)
    assert (cache.pos(a), cache.live_columns) == (9, (a,))
    assert cache.pos(cache.seq_clone(a, 5)) == 5


def test_a_negative_length_is_refused() -> None:
    cache = make_cache(cfg=config(flat_group()))
    a = cache.seq_new()
    with pytest.raises(RewindError, match="length is -1; it must not be negative"):
        cache.rewind(a, -1)


@pytest.mark.parametrize("call", ["pos", "floor", "seq_rm", "seq_clone"])
def test_a_column_without_a_sequence_is_unknown_everywhere(
    cache: BatchedSequenceCache, call: str
) -> None:
    cache.seq_new()
    with pytest.raises(UnknownColumnError, match=r"owns column 3 \(live columns: 1\)"):
        getattr(cache, call)(3)
    with pytest.raises(UnknownColumnError, match="column 0 is the scratch column"):
        getattr(cache, call)(0)
    with pytest.raises(UnknownColumnError, match="owns column 3"):
        cache.rewind(3, 0)


def test_admission_says_no_before_the_step_and_names_the_pages() -> None:
    # scratch 3 pages; one sequence 24 pages at full length
    cache = make_cache(cfg=config(budget_bytes=20 * PAGE))
    a = cache.seq_new()
    step(cache, a, times=12)
    used = cache.used_pages
    assert (used, cache.free_pages) == (3 + 3 + 5 + 8, 1)
    b = cache.seq_new()
    with pytest.raises(CacheFullError, match=r"the step needs 4 pages, 1 free; 19 of 20 are") as e:
        cache.declare_step([a, b])
    assert (e.value.needed, e.value.free, e.value.unit) == (4, 1, "pages")
    assert (cache.used_pages, cache.pos(a)) == (used, 12)
    step(cache, a)  # one page more for the flat layers
    assert cache.free_pages == 0
    cache.seq_rm(a)
    step(cache, b)
    assert cache.used_pages == 6


def test_a_clone_is_free_until_it_is_written() -> None:
    cache = make_cache()
    a = cache.seq_new()
    step(cache, a, times=7)
    used = cache.used_pages
    b = cache.seq_clone(a)
    assert cache.used_pages == used
    step(cache, b)
    assert cache.used_pages == used + 3  # the last page of each region


def test_the_last_writer_of_a_shared_page_writes_in_place() -> None:
    cache = make_cache(cfg=config(flat_group()))
    a = cache.seq_new()
    step(cache, a, times=6)
    b, c = cache.seq_clone(a), cache.seq_clone(a)
    used = cache.used_pages
    step(cache, a, b, c)
    assert cache.used_pages == used + 2


def test_a_declared_budget_counts_copies_on_write() -> None:
    # scratch 1 page, 6 tokens are 2 pages: one page is left for a copy of the second
    cache = make_cache(cfg=config(flat_group(), budget_bytes=4 * PAGE))
    a = cache.seq_new()
    step(cache, a, times=6)
    b, c = cache.seq_clone(a), cache.seq_clone(a)
    with pytest.raises(CacheFullError, match="needs 2 pages, 1 free"):
        cache.declare_step([a, b, c])
    step(cache, a)
    cache.seq_rm(a)
    step(cache, b, c)
    assert cache.free_pages == 0


class FailingStore(HostStore):
    """Runs out of memory at a wanted column."""

    failing = 0

    def prepare_write(self, col: int, start: int, end: int) -> None:
        if col == self.failing and col:
            raise StoreError("no memory")
        super().prepare_write(col, start, end)

    def prepare_writes(self, wants: object) -> None:
        ColumnStore.prepare_writes(self, wants)  # type: ignore[arg-type]

    def clone(self, src: int, dst: int, n_rows: int) -> None:
        if self.failing:
            raise StoreError("no memory")
        super().clone(src, dst, n_rows)


def test_a_store_that_runs_out_of_memory_leaves_a_declared_step() -> None:
    cache = make_cache(FailingStore)
    a, b = cache.seq_new(), cache.seq_new()
    FailingStore.failing = b
    try:
        cache.declare_step([a, b])
        with pytest.raises(StoreError, match="no memory"):
            cache.prepare_step()
        assert cache.used_pages == cache.store.committed_pages == 6
        cache.abandon_step()
        assert cache.used_pages == cache.store.committed_pages == 3
        with pytest.raises(StoreError, match="no memory"):
            cache.seq_clone(a)
        assert (cache.live_columns, cache.free_columns) == ((a, b), 2)
    finally:
        FailingStore.failing = 0
    step(cache, a, b)
    assert (cache.pos(a), cache.pos(b)) == (1, 1)


def test_a_store_of_another_configuration_is_refused() -> None:
    store = HostStore(CacheGeometry.of(config()))
    with pytest.raises(ConfigError, match="the store was made for another configuration"):
        BatchedSequenceCache(config(capacity=40), store)


def test_a_store_that_starts_above_the_budget_is_refused() -> None:
    cfg = config(budget_bytes=6 * PAGE)
    with pytest.raises(ConfigError, match=r"SmallDenseStore takes 8 pages at start .* allows 6"):
        make_cache(STORES["dense"], cfg)


def test_a_clone_diverges_from_its_source(cache: BatchedSequenceCache) -> None:
    a = cache.seq_new()
    for position in range(12):
        step(cache, a)
        write(cache.store, a, position, 100 * position)
    b = cache.seq_clone(a, 9)
    step(cache, b, times=2)
    for position in (9, 10):
        write(cache.store, b, position, 5000 + position)
    assert all(holds(cache.store, a, p, 100 * p) for p in (8, 9, 10, 11))
    assert holds(cache.store, b, 8, 800)
    assert all(holds(cache.store, b, p, 5000 + p) for p in (9, 10))
    cache.seq_rm(a)
    assert holds(cache.store, b, 8, 800)
