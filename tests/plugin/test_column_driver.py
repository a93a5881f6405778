"""The worker's side of a step: columns bound, grown, given back, refused for want of memory."""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    ConfigError,
    FlatPolicy,
    HostStore,
    LayerGroup,
    StoreError,
    StoreFullError,
)
from vllm_kv_columns.kv_manager.stores.usage import StoreUsage
from vllm_kv_columns.plugin.column_driver import ColumnDriver
from vllm_kv_columns.plugin.commands import Clone, Command, Release, Rewind, attach_commands
from vllm_kv_columns.plugin.report import (
    MemoryReport,
    UsageReport,
    attach_report,
    attach_usage,
    report_of,
    usage_of,
)
from vllm_kv_columns.plugin.shortage import REPORT_STEPS
from vllm_kv_columns.plugin.step_times import StepTimes

PAGE = 4096
ROWS_PER_PAGE = 8


@pytest.fixture
def store() -> Iterator[HostStore]:
    group = LayerGroup("flat", ("layer",), FlatPolicy(), 1, 64, "float32")  # 512 bytes a row
    config = CacheConfig(
        max_seqs=4, capacity=64, max_write=64, groups=(group,), page_size=PAGE, budget_bytes=1 << 20
    )
    with HostStore(CacheGeometry.of(config)) as made:
        yield made


def plan(
    tokens: dict[str, int],
    new: dict[str, int] | None = None,
    running: dict[str, int] | None = None,
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
    commands: Sequence[Command] | None = (),
) -> Any:
    """A scheduler's output: new requests with their columns, running ones with their lengths.

    commands: None for a plan that is not our scheduler's.
    """
    running = running or {}
    made = SimpleNamespace(
        finished_req_ids=finished or set(),
        preempted_req_ids=preempted,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request, block_ids=([column],), num_computed_tokens=0)
            for request, column in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            new_block_ids=[None] * len(running),
            num_computed_tokens=list(running.values()),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )
    if commands is not None:
        attach_commands(made, commands)
    return made


def test_pages_follow_the_plan(store: HostStore) -> None:
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8, "b": 9}, new={"a": 1, "b": 2}))
    assert store.committed_pages == 1 + 1 + 2
    driver.prepare(plan({"a": 1}, running={"a": 8}, finished={"b"}, commands=[Release(2)]))
    assert store.committed_pages == 1 + 2
    assert driver.report is None and driver.peak_pages == 4


def test_what_vllms_own_warm_up_took_is_given_back(store: HostStore) -> None:
    driver = ColumnDriver(store)
    warm_up: Any = {"commands": None}
    driver.prepare(plan({"a": 8, "b": 9}, new={"a": 1, "b": 2}, **warm_up))
    driver.prepare(plan({"a": 1, "b": 1}, running={"a": 8, "b": 9}, **warm_up))
    assert store.committed_pages == 1 + 2 + 2
    driver.prepare(plan({}, finished={"a", "b"}, **warm_up))
    assert store.committed_pages == 1


def test_a_request_without_memory_is_refused_and_the_others_go_on(store: HostStore) -> None:
    store.limit_pages = 4
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8, "b": 8, "c": 8}, new={"a": 1, "b": 2, "c": 3}))
    assert driver.report is None
    driver.prepare(plan({"a": 1, "b": 0}, running={"a": 8, "b": 8}))
    assert driver.refused == {"a"}
    # Four pages were held when it failed, one of them the scratch column's.
    assert driver.report == MemoryReport(refused=("a",), obtainable_pages=3, lost=(1,))
    assert store.committed_pages == 3


def test_what_a_refused_request_held_serves_the_next_in_the_same_step(store: HostStore) -> None:
    store.limit_pages = 3
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8, "b": 8}, new={"a": 1, "b": 2}))
    driver.prepare(plan({"a": 1, "b": 1}, running={"a": 8, "b": 8}))
    assert driver.refused == {"a"}
    assert driver.report is not None and driver.report.refused == ("a",)
    assert store.committed_pages == 3


def test_a_refusal_is_told_once_and_lasts_until_the_plan_says_preempted(store: HostStore) -> None:
    store.limit_pages = 2
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8}, new={"a": 1}))
    driver.prepare(plan({"a": 1}, running={"a": 8}))
    assert driver.report is not None and driver.report.refused == ("a",)
    driver.prepare(plan({"a": 1}, running={"a": 9}))  # planned before the scheduler knew
    assert driver.refused == {"a"} and driver.report is None
    store.limit_pages = 3
    driver.prepare(plan({"a": 9}, new={"a": 4}, preempted={"a"}))
    assert not driver.refused
    assert store.committed_pages == 3


def test_a_clone_goes_on_from_what_its_source_holds(store: HostStore) -> None:
    driver = ColumnDriver(store)
    view = store.layer_view("layer")
    driver.prepare(plan({"a": 20}, new={"a": 1}))
    view[:20, 1] = 1.0
    more = plan({"a": 1, "b": 4}, running={"a": 20}, commands=[Clone(1, 2, 12)], new={"b": 2})
    more.scheduled_new_reqs[0].num_computed_tokens = 12
    driver.prepare(more)
    view[12:16, 2] = 2.0
    assert (view[:20, 1] == 1).all() and (view[:12, 2] == 1).all()
    assert store.committed_pages == 1 + 3 + 1  # the first page of 8 rows is in both columns
    driver.prepare(plan({}, finished={"a", "b"}, commands=[Release(1), Release(2)]))
    assert store.committed_pages == 1


def test_a_column_that_changes_hands_goes_back_to_what_it_lends(store: HostStore) -> None:
    driver = ColumnDriver(store)
    view = store.layer_view("layer")
    driver.prepare(plan({"a": 20}, new={"a": 1}))
    view[:20, 1] = 1.0
    more = plan({"b": 1}, finished={"a"}, commands=[Rewind(1, 8)], new={"b": 1})
    more.scheduled_new_reqs[0].num_computed_tokens = 8
    driver.prepare(more)
    assert (view[:8, 1] == 1).all() and not view[16:20, 1].any()
    assert store.committed_pages == 1 + 2


def test_what_a_refused_column_was_to_lend_is_refused_too(store: HostStore) -> None:
    """The scheduler lends from a column before it hears that the column is gone."""
    store.limit_pages = 3
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8, "b": 8}, new={"a": 1, "b": 2}))
    driver.prepare(plan({"a": 1, "b": 0}, running={"a": 8, "b": 8}))
    assert driver.refused == {"a"}
    clones = [Clone(1, 3, 4), Clone(3, 4, 4)]
    driver.prepare(plan({"c": 1, "d": 1}, commands=clones, new={"c": 3, "d": 4}))
    assert driver.refused == {"a", "c", "d"}
    assert driver.refused_growths == 1, "c and d were not refused for want of memory"
    assert driver.report is not None and driver.report.refused == ("c", "d")
    ended = [Release(1), Release(3), Release(4)]
    driver.prepare(plan({"e": 8}, preempted={"a", "c", "d"}, commands=ended, new={"e": 3}))
    assert not driver.refused


def test_retained_columns_are_emptied_when_nothing_runs(store: HostStore) -> None:
    driver = ColumnDriver(store, retain_seconds=0.05)
    driver.prepare(plan({"a": 20, "b": 4}, new={"a": 1, "b": 2}))
    driver.prepare(plan({"b": 1}, running={"b": 4}, finished={"a"}))
    time.sleep(0.2)
    assert store.committed_pages == 1 + 3 + 1  # b runs
    driver.prepare(plan({}, finished={"b"}))
    deadline = time.monotonic() + 5
    while store.committed_pages > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.committed_pages == 1
    driver.prepare(plan({"c": 1, "d": 8}, commands=[Clone(1, 3, 8)], new={"c": 3, "d": 4}))
    assert driver.refused == {"c"} and driver.refused_growths == 0
    assert driver.report is not None
    assert (driver.report.refused, driver.report.lost) == (("c",), (1, 2, 3))
    driver.prepare(plan({"d": 1}, running={"d": 8}))
    assert driver.report is None


def test_a_limit_must_hold_one_sequence_of_the_served_length(store: HostStore) -> None:
    driver = ColumnDriver(store)
    with pytest.raises(ConfigError, match=f"of 64 tokens may need 9: set at least {9 * PAGE} b"):
        driver.set_limit(8 * PAGE, longest=64)
    assert store.page_limit == (1 << 20) // PAGE
    driver.set_limit(6 * PAGE, longest=40)  # what vLLM fitted to the memory
    assert store.page_limit == 6
    driver.prepare(plan({}))
    assert driver.report == MemoryReport((), 5)


def test_giving_back_leaves_the_scratch_column_alone(store: HostStore) -> None:
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 20, "b": 4}, new={"a": 1, "b": 2}))
    driver.prepare(plan({"b": 1}, running={"b": 4}, finished={"a"}))  # a's column is retained
    driver.grow_ahead()
    driver.give_back()
    assert store.committed_pages == 1
    # Whoever would go on from what is gone is refused, and the scheduler is told what is gone.
    driver.prepare(plan({"b": 1}, running={"b": 5}))
    assert driver.refused == {"b"} and store.committed_pages == 1
    assert driver.report is not None and driver.report.lost == (1, 2)
    driver.prepare(plan({"c": 8}, new={"c": 1}, preempted={"b"}, commands=[Release(1), Release(2)]))
    assert not driver.refused and store.committed_pages == 1 + 1


def test_giving_back_takes_spare_memory_too(store: HostStore) -> None:
    trimmed: list[int] = []
    store.spare_bytes = 1 << 20
    store.trim = lambda: trimmed.append(store.spare_bytes)  # type: ignore[method-assign]
    ColumnDriver(store).give_back()
    assert trimmed == [0] and store.spare_bytes == 1 << 20


def test_a_clone_that_gets_no_memory_is_refused(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> None:
        raise StoreFullError("taken by somebody else", 1)

    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8}, new={"a": 1}))
    monkeypatch.setattr(store, "clone", full)
    driver.prepare(plan({"a": 1, "b": 1}, {"b": 2}, {"a": 8}, commands=[Clone(1, 2, 4)]))
    assert driver.refused == {"b"} and driver.refused_growths == 1
    assert driver.report is not None and driver.report.refused == ("b",)


class SharedHostStore(HostStore):
    """Somebody else has taken pages of what the budget promises."""

    taken = 0

    def prepare_write(self, col: int, start: int, end: int) -> None:
        needed = self.pages_needed({col: (start, end)})
        if self.committed_pages + needed > self.obtainable_pages():
            raise StoreFullError("taken by somebody else", needed)
        super().prepare_write(col, start, end)

    def obtainable_pages(self) -> int:
        return super().obtainable_pages() - self.taken


def test_the_scheduler_hears_when_memory_is_back(store: HostStore) -> None:
    with SharedHostStore(store.geometry) as shared:
        shared.limit_pages, shared.taken = 7, 5
        driver = ColumnDriver(shared)
        driver.prepare(plan({"a": 16}, new={"a": 1}))
        assert driver.report == MemoryReport(refused=("a",), obtainable_pages=1, lost=(1,))
        shared.taken = 0
        for _ in range(REPORT_STEPS):
            driver.prepare(plan({}))
            assert driver.report is None
        driver.prepare(plan({}))
        assert driver.report == MemoryReport(refused=(), obtainable_pages=6)
        for _ in range(2 * REPORT_STEPS):
            driver.prepare(plan({}))
            assert driver.report is None


def test_all_workers_refuse_what_one_cannot_back(store: HostStore) -> None:
    def other_worker_has_no_memory_for_the_second(mine: list[int]) -> list[int]:
        theirs = [0, 1] if len(mine) == 2 else [-2]
        return [max(pair) for pair in zip(mine, theirs, strict=True)]

    driver = ColumnDriver(store, agree=other_worker_has_no_memory_for_the_second)
    driver.prepare(plan({"a": 8, "b": 8}, new={"a": 1, "b": 2}))
    assert driver.refused == {"b"} and driver.refused_growths == 1
    assert driver.report == MemoryReport(refused=("b",), obtainable_pages=1, lost=(2,))
    assert store.committed_pages == 2


def test_a_streamed_prompt_goes_on_in_its_column(store: HostStore) -> None:
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 8}, new={"a": 1}))
    store.layer_view("layer")[3, 1] = 7.0
    more = plan({"a": 8}, new={"a": 1})
    more.scheduled_new_reqs[0].num_computed_tokens = 8
    driver.prepare(more)
    assert store.layer_view("layer")[3, 1].min() == 7.0
    assert store.committed_pages == 3


def test_misuse_is_not_a_shortage(store: HostStore) -> None:
    with pytest.raises(StoreError, match="positions are"):
        ColumnDriver(store).prepare(plan({"a": 65}, new={"a": 1}))


def test_rows_that_are_there_need_no_work_before_the_launch(store: HostStore) -> None:
    driver = ColumnDriver(store)
    driver.prepare(plan({"a": 3}, new={"a": 1}))
    for length in range(3, ROWS_PER_PAGE):
        step = plan({"a": 1}, running={"a": length})
        assert driver._missing(step) == {}
        driver.prepare(step)
        driver.grow_ahead()
    assert driver._missing(plan({"a": 1}, running={"a": ROWS_PER_PAGE})) == {1: (8, 9)}


class ReadyHostStore(HostStore):
    """Says which rows are backed, and what it was asked to make ready in each call."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry)
        self.asked: list[dict[int, tuple[int, int]]] = []
        self.ends = [0] * geometry.cols

    def writable(self) -> list[int]:
        return [-(-end // ROWS_PER_PAGE) * ROWS_PER_PAGE for end in self.ends]

    def prepare_writes(self, wants: Mapping[int, tuple[int, int]]) -> None:
        self.asked.append(dict(wants))
        super().prepare_writes(wants)
        for column, (_, end) in wants.items():
            self.ends[column] = max(self.ends[column], end)


def test_steady_decodes_look_at_the_requests_beside_the_step(store: HostStore) -> None:
    with ReadyHostStore(store.geometry) as ready:
        driver = ColumnDriver(ready)
        driver.prepare(plan({"a": 3, "b": 5}, new={"a": 1, "b": 2}))
        driver.grow_ahead()
        for step in range(4):
            driver.prepare(plan({"a": 1, "b": 1}, running={"a": 3 + step, "b": 5 + step}))
            before = len(ready.asked)
            assert (driver._later is not None) == (step in (1, 2))
            driver.grow_ahead()
            whole = {1: (3 + step, 4 + step), 2: (5 + step, 6 + step)}
            assert ready.asked[before:] == [whole]
            # Position 8 of b is the first on its next page: the one row that a launch waits for.
            assert ready.asked[before - 1] == ({2: (8, 9)} if step == 3 else {})


@pytest.mark.parametrize(
    "change", ["another request", "a new one", "more tokens", "a column", "no work beside the step"]
)
def test_a_step_that_is_more_than_the_next_token_is_looked_at(
    store: HostStore, change: str
) -> None:
    with ReadyHostStore(store.geometry) as ready:
        driver = ColumnDriver(ready)
        driver.prepare(plan({"a": 3, "b": 3}, new={"a": 1, "b": 2}))
        driver.grow_ahead()
        driver.prepare(plan({"a": 1, "b": 1}, running={"a": 3, "b": 3}))
        if change != "no work beside the step":
            driver.grow_ahead()
        step = plan({"a": 1, "b": 1}, running={"a": 4, "b": 4})
        if change == "another request":
            step = plan({"a": 1}, running={"a": 4})
        elif change == "a new one":
            step = plan({"a": 1, "b": 1, "c": 1}, running={"a": 4, "b": 4}, new={"c": 3})
        elif change == "more tokens":
            step = plan({"a": 6, "b": 1}, running={"a": 4, "b": 4})
        elif change == "a column":
            step.scheduled_cached_reqs.new_block_ids[0] = ([4],)
        driver.prepare(step)
        assert driver._later is None
        driver.grow_ahead()
        assert set(driver._wants) == {
            "another request": {1},
            "a new one": {1, 2, 3},
            "a column": {4, 2},
        }.get(change, {1, 2})


def test_steps_of_decodes_are_timed_on_their_own() -> None:
    times = StepTimes()
    times.add(0.0, 0.5, decodes=False)
    times.add(1.0, 1.25, decodes=True)
    times.add(2.0, 2.125, decodes=True)
    times.add(4.0, 4.125, decodes=True)
    times.add(7.0, 9.0, decodes=False)
    assert times.take() == {
        "steps": 5,
        "prepare_seconds": 3.0,
        "longest_prepare_seconds": 2.0,
        "decode_steps": 2,
        "decode_seconds": 3.0,
        "decode_prepare_seconds": 0.375,
    }
    assert times.take()["longest_prepare_seconds"] == 0


def test_what_the_store_holds_is_told_when_it_has_changed(store: HostStore) -> None:
    driver = ColumnDriver(store)
    assert driver.take_usage() == UsageReport(StoreUsage(1, mapped=1), 0)
    driver.prepare(plan({"a": 8}, new={"a": 1}))
    assert driver.take_usage() == UsageReport(StoreUsage(2, mapped=2), 0)
    assert driver.take_usage() is None
    driver.prepare(plan({"a": 1, "b": 4}, {"b": 2}, {"a": 8}, commands=[Clone(1, 2, 8)]))
    # One page more for a, none for b, which shares a's first until it writes.
    assert driver.take_usage() == UsageReport(StoreUsage(4, mapped=5, unmapped=1), 0)
    driver.prepare(plan({}, finished={"a", "b"}, commands=[Release(1), Release(2)]))
    assert driver.take_usage() == UsageReport(StoreUsage(1, mapped=5, unmapped=4), 0)


def test_reports_travel_on_an_output() -> None:
    output = SimpleNamespace()
    assert report_of(output) is None and usage_of(output) is None
    attach_report(output, MemoryReport(("a",), 5))
    attach_usage(output, UsageReport(StoreUsage(3), 1))
    assert report_of(output) == MemoryReport(("a",), 5)
    assert usage_of(output) == UsageReport(StoreUsage(3), 1)
