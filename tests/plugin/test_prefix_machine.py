"""Columns under a scheduler's traces, on a store with real bytes, against what a prompt must find.

Each row is filled with a number that stands for all tokens up to its own. So a row that was lent
wrongly, overwritten or lost is seen as soon as a request or a retained column should have it.
"""

import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool

from tests.kv_manager.builders import FakeCudaStore
from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    ColumnStore,
    FlatPolicy,
    HostStore,
    LayerGroup,
    RingPolicy,
    StoreError,
)
from vllm_kv_columns.kv_manager.stores.region import HostRegion
from vllm_kv_columns.plugin.column_driver import ColumnDriver
from vllm_kv_columns.plugin.column_manager import ColumnManager
from vllm_kv_columns.plugin.column_table import ColumnTable
from vllm_kv_columns.plugin.columns import Column
from vllm_kv_columns.plugin.commands import attach_commands
from vllm_kv_columns.plugin.lenders import Lenders
from vllm_kv_columns.plugin.page_pool import PagePool
from vllm_kv_columns.plugin.spec import ColumnSpec

PAGE, CAPACITY, MAX_WRITE, BLOCK, WINDOW = 4096, 96, 12, 4, 7
BUDGET, LARGEST_BUDGET, COLUMNS, MOST_RUNNING = 60, 75, 6, 4
FLAT, RING = "flat", "ring"  # 512 and 1024 bytes a row, of float32: 8 and 4 rows a page


@pytest.fixture(scope="module", autouse=True)
def whole_hashes_in_events() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        yield


def number(tokens: list[int]) -> float:
    return float(zlib.crc32(bytes(tokens)) % (1 << 22))


class Request:
    lora_request = session_id = cache_salt = prompt_embeds = None
    mm_features = ()

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id, self.tokens, self.computed = name, list(tokens), 0

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [
            bytes(self.tokens[: end + BLOCK])
            for end in range(0, len(self.tokens) - BLOCK + 1, BLOCK)
        ]


class Router:
    """What events make somebody believe who hears nothing else.

    A block's hash is the tokens up to its end here.

    Attributes:
        stored: hashes.
        ever: hashes that were.
    """

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.ever: set[bytes] = set()
        self.cleared = 0

    def hear(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                before = event.parent_block_hash or b""
                assert not before or before in self.stored
                told = [before + bytes(event.token_ids[: i + BLOCK]) for i in self._starts(event)]
                assert event.block_hashes == told and not self.stored & {*told}, "stored once"
                self.stored |= {*told}
                self.ever |= {*told}
            elif isinstance(event, BlockRemoved):
                gone = {*event.block_hashes}
                assert len(gone) == len(event.block_hashes) and gone <= self.stored
                self.stored -= gone
            else:
                assert isinstance(event, AllBlocksCleared)
                self.stored.clear()
                self.cleared += 1

    @staticmethod
    def _starts(event: BlockStored) -> range:
        assert event.block_size == BLOCK
        return range(0, len(event.token_ids), BLOCK)


class Serving(RuleBasedStateMachine):
    store_type: type[ColumnStore] = HostStore
    groups: tuple[LayerGroup, ...] = (LayerGroup("flat", (FLAT,), FlatPolicy(), 1, 64, "float32"),)
    limits_change: ClassVar[bool] = True
    whole_limit: ClassVar[bool] = True  # no page is idle in an extent that a column needs in part

    def __init__(self) -> None:
        super().__init__()
        config = CacheConfig(
            max_seqs=COLUMNS,
            capacity=CAPACITY,
            max_write=MAX_WRITE,
            groups=self.groups,
            page_size=PAGE,
            budget_bytes=1 << 30,
        )
        self.geometry = CacheGeometry.of(config)
        spec = ColumnSpec(
            block_size=128,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.float32,
            cache=config,
            rows=CAPACITY,
            window=None,
            block_tokens=BLOCK,
            cut_pages=self.store_type.cut_pages,
            compact=True,
        )
        self.pool = BlockPool(
            BUDGET + 1, enable_caching=True, hash_block_size=128, enable_kv_cache_events=True
        )
        self.manager = ColumnManager(
            spec,
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=128,
        )
        self.table = self.manager.table
        self.store = self.store_type(self.geometry)
        self.store.limit_pages = BUDGET + self.geometry.scratch_pages
        self.driver = ColumnDriver(self.store)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: set[str] = set()
        self.preempted: set[str] = set()
        self.held: dict[int, list[int]] = {}  # column -> tokens whose rows were written
        self.names = 0
        self.hits = 0
        self.unheard = 0  # steps until a new limit holds
        self.router = Router()

    def teardown(self) -> None:
        for request in self.running:
            self.manager.free(request.request_id)
        self.router.hear(self.pool.take_events())
        assert self.pool.reset_prefix_cache()
        self.router.hear([*self.pool.take_events(), *self.pool.take_events()])
        assert self.router.cleared == 1 and not self.router.stored
        assert self.table.pages.retained == 0 and self.pool.unused_pages == self._budget()
        plan = self._plan({}, {}, {})
        self.driver.prepare(plan)
        assert self.store.committed_pages == self.geometry.scratch_pages
        self.store.close()

    # What happens.

    @rule(
        cut=st.integers(0, 90),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=40),
        data=st.data(),
    )
    def ask(self, cut: int, more: list[int], data: st.DataObject) -> None:
        """A prompt that begins as something that was told before, up to any point."""
        told = sorted((bytes(tokens) for tokens in self.held.values()), key=len)
        base = list(data.draw(st.sampled_from(told))) if told else []
        tokens = (base[:cut] + more)[: CAPACITY - 1]
        self.waiting.append(Request(str(self.names), tokens))
        self.names += 1

    @precondition(lambda self: self.running or self.waiting)
    @rule(chunk=st.integers(1, MAX_WRITE), answer=st.integers(0, 2))
    def step(self, chunk: int, answer: int) -> None:
        """What vLLM's scheduler does: running requests first, then as many waiting ones as fit."""
        self.manager.new_step_starts()
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(chunk, len(request.tokens) - request.computed)
            while not self._grow(request, request.computed + count, ()):
                last = self.running[-1]
                self._preempt(last)
                scheduled.pop(last.request_id, None)
                if last is request:
                    break
            else:
                scheduled[request.request_id] = count
        old = {one.request_id: one.computed for one in self.running}
        new: dict[str, Request] = {}
        while self.waiting and len(self.running) < MOST_RUNNING and not self.preempted:
            request = self.waiting[0]
            (blocks,), found = self.manager.find_longest_cache_hit(
                request.block_hashes, len(request.tokens) - 1
            )
            self._check_found(request, found)
            count = min(chunk, len(request.tokens) - found)
            if not self._grow(request, found + count, blocks):
                break
            self.hits += found
            request.computed = found
            scheduled[request.request_id] = count
            new[request.request_id] = request
            self.running.append(self.waiting.pop(0))
        self.driver.prepare(self._plan(scheduled, new, old))
        self._hear(scheduled)
        self._write(scheduled)
        self.driver.grow_ahead()
        self.unheard = max(0, self.unheard - 1)
        for request in self.running:
            request.computed += scheduled[request.request_id]
            if request.computed == len(request.tokens):
                if len(request.tokens) == CAPACITY:
                    self._end(request)
                else:
                    request.tokens.append(answer)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._preempt(data.draw(st.sampled_from(self.running)))

    @rule()
    def evict(self) -> None:
        self.table.evict()

    @precondition(lambda self: self.limits_change)
    @rule(pages=st.integers(1, LARGEST_BUDGET))
    def change_the_limit(self, pages: int) -> None:
        """The next step still has what was promised; its report tells, the one behind obeys."""
        least = self.geometry.pages_for(CAPACITY)
        pages = max(pages, least) + self.geometry.scratch_pages
        self.driver.set_limit(pages * PAGE, CAPACITY)
        self.unheard = 2

    @precondition(lambda self: not self.running)
    @rule()
    def nothing_happens_for_a_while(self) -> None:
        self.driver.prepare(self._plan({}, {}, {}))
        self._hear({})
        self.driver._empty_retained()
        assert self.store.committed_pages == self.geometry.scratch_pages

    # How.

    def _hear(self, scheduled: dict[str, int]) -> None:
        """What vLLM's scheduler makes of a report."""
        report = self.driver.report
        if report is None:
            return
        limit = self.store.page_limit - self.geometry.scratch_pages
        if self.whole_limit:
            assert report.obtainable_pages == limit
        assert report.obtainable_pages <= limit
        for column in report.lost:
            self.table.empty(column)
        for request in [one for one in self.running if one.request_id in report.refused]:
            self._preempt(request)
            del scheduled[request.request_id]

        def preempt_last() -> bool:
            if not self.running:
                return False
            scheduled.pop(self.running[-1].request_id, None)
            self._preempt(self.running[-1])
            return True

        self.pool.bound(report.obtainable_pages, preempt_last)

    def _grow(self, request: Request, tokens: int, blocks: Any) -> bool:
        name = request.request_id
        missing = self.manager.get_num_blocks_to_allocate(name, tokens, blocks)
        if missing > self.pool.get_num_free_blocks():
            return False
        if blocks:
            self.manager.add_local_computed_blocks(name, blocks, 0, 0)
        free = self.pool.get_num_free_blocks()
        self.manager.allocate_new_blocks(name, tokens, tokens)
        assert blocks or free - self.pool.get_num_free_blocks() == missing
        self.manager.cache_blocks(request, min(tokens, len(request.tokens)))
        return True

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request.request_id)
        self.ended.add(request.request_id)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request.request_id)
        self.preempted.add(request.request_id)
        request.computed = 0
        self.waiting.insert(0, request)

    def _plan(self, scheduled: dict[str, int], new: dict[str, Request], old: dict[str, int]) -> Any:
        cached = [name for name in scheduled if name not in new]
        plan = SimpleNamespace(
            finished_req_ids=self.ended,
            preempted_req_ids=self.preempted,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, block_ids=([self._column(name)],), num_computed_tokens=one.computed
                )
                for name, one in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                new_block_ids=[None] * len(cached),
                num_computed_tokens=[old[name] for name in cached],
            ),
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        attach_commands(plan, self.table.take_commands())
        self.ended, self.preempted = set(), set()
        return plan

    def _column(self, name: str) -> int:
        (block,) = self.manager.req_to_blocks[name]
        column: int = block.block_id
        return column

    def _write(self, scheduled: dict[str, int]) -> None:
        for request in self.running:
            column, begin = self._column(request.request_id), request.computed
            end = begin + scheduled[request.request_id]
            self.held[column] = request.tokens[:end]
            for group in self.groups:
                view = self.store.layer_view(group.layers[0])
                for at in range(begin, end):
                    view[at % view.shape[0], column] = number(request.tokens[: at + 1])

    def _check_found(self, request: Request, found: int) -> None:
        """With flat layers alone nothing that could be lent is missed."""
        assert found < len(request.tokens) and found % BLOCK == 0
        if len(self.groups) > 1:
            return
        best = 0
        for column in self._columns():
            for blocks in range(len(column.hashes), 0, -1):
                if column.hashes[:blocks] == request.block_hashes[:blocks]:
                    best = max(best, blocks)
                    break
        assert found == min(best, (len(request.tokens) - 1) // BLOCK) * BLOCK

    def _columns(self) -> list[Column]:
        return list(self.table._columns.values())

    def _budget(self) -> int:
        pool: PagePool = self.table.pages.pool
        return int(pool.num_gpu_blocks) - 1 - len(pool.withheld)

    # What must hold.

    @invariant()
    def rows_are_what_their_tokens_say(self) -> None:
        for request in self.running:
            self._check_rows(self._column(request.request_id), request.tokens, request.computed)

    @invariant()
    def what_is_to_be_lent_is_there(self) -> None:
        commands = {command.column for command in self.table.commands}
        for column in self._columns():
            if column.hashes and column.number not in commands | self.driver._void:
                tokens = list(column.hashes[-1])
                if self.geometry.floor(column.high) <= len(tokens):
                    self._check_rows(column.number, tokens, len(tokens))

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        """By a prompt of the next step; of columns with rings, if it goes on far enough."""
        self.router.hear(self.pool.take_events())
        held = {one for column in self._columns() for one in column.hashes}
        for tokens in self.router.ever | held:
            hit = self.table.lenders.find(Request("", list(tokens)).block_hashes, len(tokens))
            blocks = len(tokens) // BLOCK
            assert (hit.coming >= blocks) == (tokens in self.router.stored)
            if hit.blocks == blocks:
                assert hit.coming >= blocks
            elif len(self.groups) == 1 and tokens in self.router.stored:
                assert any(tokens in coming for coming in self.table.lenders._coming.values())

    @invariant()
    def columns_are_counted_by_state(self) -> None:
        counts = self.table.count_columns()
        assert counts["running"] == len(self.running)
        assert counts["retained"] == sum(column.request is None for column in self._columns())
        assert sum(counts.values()) == COLUMNS

    @invariant()
    def what_the_store_maps_is_counted(self) -> None:
        usage = self.store.usage()
        assert usage.committed == self.store.committed_pages
        held = (usage.committed + usage.spare) * self.geometry.page_size
        assert held == self.store.resident_bytes()
        mapped = usage.mapped - usage.unmapped
        assert mapped >= usage.committed

    @invariant()
    def the_limit_holds(self) -> None:
        if not self.unheard:
            assert self.store.committed_pages <= self.store.page_limit
            pages = {p.block_id for c in self._columns() for pages in c.pages for p in pages}
            assert len(pages) + self.geometry.scratch_pages <= self.store.page_limit

    def _check_rows(self, column: int, tokens: list[int], length: int) -> None:
        for group in self.groups:
            view = self.store.layer_view(group.layers[0])
            window = group.policy.window
            for at in range(0 if window is None else max(0, length - window + 1), length):
                row = view[at % view.shape[0], column]
                assert (row == number(tokens[: at + 1])).all(), (group.name, column, at)

    @invariant()
    def pages_are_counted(self) -> None:
        columns = self._columns()
        used = {p.block_id for c in columns if c.request for pages in c.pages for p in pages}
        all_pages = {p.block_id for c in columns for pages in c.pages for p in pages}
        assert self.table.pages.retained == len(all_pages - used)
        assert self.pool.unused_pages == self._budget() - len(all_pages)
        shared = {p.block_id for c in columns for pages in c.pages for p in pages if p.ref_cnt > 1}
        assert self.table.pages.shared == len(shared)
        for page in (p for c in columns for pages in c.pages for p in pages):
            assert page.ref_cnt == sum(page in pages for c in columns for pages in c.pages)
        if not self.table.commands:
            assert self.store.committed_pages - self.geometry.scratch_pages <= len(all_pages)


class RingServing(Serving):
    groups = (
        LayerGroup("flat", (FLAT,), FlatPolicy(), 1, 64, "float32"),
        LayerGroup("ring", (RING,), RingPolicy(WINDOW), 2, 64, "float32"),
    )


class SteadyRingServing(RingServing):
    """Its limit stays, so that other faults are found soon."""

    limits_change = False


class SmallExtentStore(FakeCudaStore):
    """The store for CUDA devices, over a driver that is only pretended.

    A step here asks for so few pages that no extent of a column is larger, but what clones copied.
    """

    cut_pages: ClassVar[int] = 3


class CudaServing(RingServing):
    store_type = SmallExtentStore
    whole_limit = False


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestServing = Serving.TestCase
TestServing.settings = SETTINGS
TestRingServing = RingServing.TestCase
TestRingServing.settings = SETTINGS
TestCudaServing = CudaServing.TestCase
TestCudaServing.settings = SETTINGS


def test_the_hits_of_a_trace() -> None:
    """A prompt, the same again, one that branches off inside, one that goes on."""
    serving = Serving()
    prompt = [i % 3 for i in range(40)]

    def serve(tokens: list[int]) -> int:
        before = serving.hits
        request = Request(str(serving.names), tokens)
        serving.names += 1
        serving.waiting.append(request)
        while request.computed < len(tokens):
            serving.step(MAX_WRITE, 0)
        serving._end(request)
        return serving.hits - before

    try:
        assert serve(prompt) == 0
        assert serve(prompt) == 36
        assert serve([*prompt[:22], 2, 2, 2]) == 20
        assert serve([*prompt, 1, 1]) == 40
    finally:
        serving.teardown()


@pytest.mark.parametrize("machine", [Serving, RingServing])
def test_samples_of_one_prompt_wait_for_the_first(machine: type[Serving]) -> None:
    serving = machine()
    for i in range(3):
        serving.waiting.append(Request(str(i), [1] * MAX_WRITE))
    serving.step(MAX_WRITE, 0)
    assert [one.request_id for one in serving.running] == ["0"]
    serving.step(MAX_WRITE, 0)
    assert serving.hits == 2 * 8
    serving.rows_are_what_their_tokens_say()
    serving.teardown()


FOUND = settings(SETTINGS, max_examples=400, database=None, phases=[Phase.generate])


def break_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that other columns have is written in place."""
    monkeypatch.setattr(HostRegion, "privatize", lambda *args: None)


def break_page_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page at the end of a clone is counted as shared, though it gets a copy."""
    monkeypatch.setattr(
        ColumnTable,
        "_whole_pages",
        staticmethod(lambda region, tokens: -(-tokens * region.row_bytes // region.page_size)),
    )


def leave_out_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told when a column goes."""
    monkeypatch.setattr(Lenders, "_tell_gone", lambda self, blocks: None)


def remove_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is removed when one of its columns goes, though another has it."""
    monkeypatch.setattr(
        Lenders, "_tell_gone", lambda self, blocks: self.events and self.events.removed(blocks)
    )


@pytest.mark.parametrize(
    "fault",
    [
        break_shared_pages,
        break_page_count,
        leave_out_removals,
        remove_with_the_first,
    ],
)
def test_control_the_machine_notices(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):
        run_state_machine_as_test(SteadyRingServing, settings=FOUND)


@pytest.mark.parametrize("known", [True, False])
def test_control_a_ring_cannot_go_back_beyond_its_floor(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(CacheGeometry, "floor", lambda self, high: 0)
    serving, prompt = RingServing(), [i * i % 3 for i in range(60)]
    for tokens in prompt, [*prompt[:20], 2, 2]:
        request = Request(str(len(tokens)), tokens)
        serving.waiting.append(request)
        while request.computed < len(tokens):
            serving.step(MAX_WRITE, 0)
            if known or serving.hits == 0:
                serving.rows_are_what_their_tokens_say()
            else:
                with pytest.raises(AssertionError):
                    serving.rows_are_what_their_tokens_say()
        serving._end(request)
    assert (serving.hits > 0) is not known


@pytest.mark.parametrize("heard", [True, False])
def test_control_a_lower_limit_must_reach_the_scheduler(
    heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not heard:
        monkeypatch.setattr(PagePool, "bound", lambda *args: None)
    serving = RingServing()
    serving.waiting += [Request(str(i), [i] * 50) for i in range(MOST_RUNNING)]
    for _ in range(5):
        serving.step(MAX_WRITE, 0)
    serving.change_the_limit(1)
    serving.step(MAX_WRITE, 0)
    serving.step(MAX_WRITE, 0)
    if heard:
        serving.the_limit_holds()
        assert len(serving.running) < MOST_RUNNING
    else:
        with pytest.raises(AssertionError):
            serving.the_limit_holds()
