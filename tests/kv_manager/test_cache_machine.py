"""Random use of the cache against a model of plain lists, on all stores.

The model keeps, for each sequence, its tokens and for each ring which position sits in which slot.
Every token has a number that is written to the store at its slot in every layer, and every row
that the model says is still held is read back after each move.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kv_columns.kv_manager import (
    BatchedSequenceCache,
    CacheFullError,
    ColumnStore,
    HostStore,
    RewindError,
    StepError,
    StepOrderError,
    StoreFullError,
)

from .builders import PAGE, FakeCudaStore, SmallDenseStore, config, is_zero, make_cache

CONFIG = config(budget_bytes=61 * PAGE)  # four full sequences would need 99
WINDOWS = {8: 5, 14: 11}  # rows of a ring: its window


@dataclass
class Sequence:
    """Tokens by position, and for each ring {slot: position}."""

    tokens: list[int] = field(default_factory=list)
    slots: dict[int, dict[int, int]] = field(default_factory=lambda: {rows: {} for rows in WINDOWS})

    def write(self, position: int) -> None:
        for rows, slots in self.slots.items():
            slots[position % rows] = position

    def prefix(self, n: int) -> "Sequence":
        slots = {
            rows: {slot: p for slot, p in held.items() if p < n}
            for rows, held in self.slots.items()
        }
        return Sequence(self.tokens[:n], slots)

    def can_be(self, n: int) -> bool:
        """Whether the next query at position n finds all its rows."""
        return all(
            self.slots[rows].get(p % rows) == p
            for rows, window in WINDOWS.items()
            for p in range(max(0, n - window + 1), n)
        )

    def floor(self) -> int:
        n = len(self.tokens)
        while n and self.can_be(n - 1):
            n -= 1
        return n

    def held(self, rows: int) -> list[int]:
        if rows not in self.slots:
            return list(range(len(self.tokens)))
        slots = self.slots[rows]
        return [p for p in range(len(self.tokens)) if slots.get(p % rows) == p]


class CacheMachine(RuleBasedStateMachine):
    store_class: type[ColumnStore]
    clones_cost = False  # some pages at once, and not when written

    @initialize(length=st.integers(0, 20))
    def start(self, length: int) -> None:
        self.cache: BatchedSequenceCache = make_cache(self.store_class, CONFIG)
        self.store = self.cache.store
        self.model: dict[int, Sequence] = {}
        self.next_token = 1
        self.new()
        for _ in range(length):
            self.one_step([1], True, None, "commit", False)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)), label="column")

    def state(self) -> dict[str, Any]:
        cache = self.cache
        live = cache.live_columns
        return {
            "lengths": {col: (cache.pos(col), cache.floor(col)) for col in live},
            "free": (cache.free_columns, cache.free_pages),
            "store": self.store.committed_pages,
        }

    @contextmanager
    def refused(self, *errors: type[Exception]) -> Iterator[None]:
        before = self.state()
        with pytest.raises(errors):
            yield
        assert self.state() == before

    def put(self, col: int, position: int, token: int) -> None:
        self.model[col].write(position)
        for number, layer in enumerate(self.store.geometry.layers):
            rows = self.store.geometry.region_of(layer).rows
            row = self.store.layer_view(layer)[position % rows, col]
            row[0], row[1] = 8 * token + number, -(8 * token + number)

    # --- moves

    @rule()
    def new(self) -> None:
        if len(self.model) == self.cache.max_seqs:
            with self.refused(CacheFullError):
                self.cache.seq_new()
            return
        col = self.cache.seq_new()
        assert col not in self.model
        assert is_zero(self.store, col)
        self.model[col] = Sequence()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        col = self.some(data)
        self.cache.seq_rm(col)
        del self.model[col]
        assert is_zero(self.store, col)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), whole=st.booleans())
    def clone(self, data: st.DataObject, whole: bool) -> None:
        src = self.some(data)
        sequence = self.model[src]
        n = data.draw(st.integers(sequence.floor(), len(sequence.tokens)), label="rows")
        if len(self.model) == self.cache.max_seqs:
            with self.refused(CacheFullError):
                self.cache.seq_clone(src, n)
            return
        used, n = self.cache.used_pages, len(sequence.tokens) if whole else n
        most = self.store.geometry.pages_for(n) if self.clones_cost else 0
        before = self.state()
        try:
            col = self.cache.seq_clone(src, None if whole else n)
        except StoreFullError:
            assert most > self.cache.free_pages and self.state() == before
            return
        assert self.least_cost(n) <= self.cache.used_pages - used <= most
        self.model[col] = sequence.prefix(n)

    def least_cost(self, n: int) -> int:
        """Pages of n tokens that hold a part of row n-1, and may be written next."""
        regions = self.store.geometry.regions if self.clones_cost else ()
        return sum(
            region.pages_of_rows(n) - n * region.row_bytes // PAGE
            for region in regions
            if n < region.rows
        )

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        col = self.some(data)
        sequence = self.model[col]
        n = data.draw(st.integers(sequence.floor(), len(sequence.tokens)), label="length")
        self.cache.rewind(col, n)
        self.model[col] = sequence.prefix(n)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), leave=st.booleans())
    def rewind_to_the_floor_and_one_below(self, data: st.DataObject, leave: bool) -> None:
        col = self.some(data)
        sequence = self.model[col]
        floor = sequence.floor()
        for call in (self.cache.rewind, self.cache.seq_clone):
            with self.refused(RewindError):
                call(col, floor - 1)
            with self.refused(RewindError):
                call(col, len(sequence.tokens) + 1)
        if not leave:
            self.cache.rewind(col, floor)
            self.model[col] = sequence.prefix(floor)

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        causal=st.booleans(),
        padding=st.none() | st.integers(0, 3),
        end=st.sampled_from(["commit", "commit", "commit", "abandon declared", "abandon written"]),
        meddle=st.booleans(),
    )
    def step(
        self,
        data: st.DataObject,
        causal: bool,
        padding: int | None,
        end: str,
        meddle: bool,
    ) -> None:
        segment = st.tuples(st.sampled_from(sorted(self.model)), st.integers(1, 3))
        drawn = data.draw(st.lists(segment, min_size=1, max_size=9), label="segments")
        self.one_step([c for c, n in drawn for _ in range(n)], causal, padding, end, meddle)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), counts=st.lists(st.integers(1, CONFIG.max_write), min_size=2, max_size=7))
    def run(self, data: st.DataObject, counts: list[int]) -> None:
        """Let one sequence grow for a while, so that rings wrap and the budget fills."""
        col = self.some(data)
        for count in counts:
            self.one_step([col] * count, True, None, "commit", False)

    # --- a step, and what the model expects of it

    def expected_error(self, cols: list[int], causal: bool) -> type[Exception] | None:
        starts = [i for i, col in enumerate(cols) if i == 0 or cols[i - 1] != col]
        owners = [cols[i] for i in starts]
        if len(starts) > 2 * CONFIG.max_seqs or (not causal and len(set(owners)) < len(owners)):
            return StepError
        errors: list[type[Exception]] = []
        for col in dict.fromkeys(owners):
            if cols.count(col) > CONFIG.max_write:
                errors.append(StepError)
            elif len(self.model[col].tokens) + cols.count(col) > CONFIG.capacity:
                errors.append(CacheFullError)
        return errors[0] if errors else None

    def one_step(
        self, cols: list[int], causal: bool, padding: int | None, end: str, meddle: bool
    ) -> None:
        cache, model = self.cache, self.model
        expected = self.expected_error(cols, causal)
        if expected is not None:
            with self.refused(expected):
                cache.declare_step(cols, causal=causal)
            return
        before = self.state()
        try:
            plan = cache.declare_step(cols, causal=causal)
        except CacheFullError as error:
            assert error.unit == "pages"
            assert error.needed > error.free == cache.free_pages
            assert self.state() == before
            return
        assert self.state() == before
        needed = self.store.pages_needed(plan.wants)
        if meddle:
            with self.refused(StepOrderError):
                cache.commit_step()
            for call in (cache.seq_new, lambda: cache.declare_step(cols)):
                with self.refused(StepOrderError):
                    call()
        if end == "abandon declared":
            cache.abandon_step()
            assert self.state() == before
            return
        width = None if padding is None else len(cols) + padding
        plan = cache.prepare_step(width)
        assert cache.prepare_step() == plan
        assert cache.used_pages == before["store"] + needed
        if meddle:
            for other in (min(model), max(model)):
                with self.refused(StepOrderError):
                    cache.seq_rm(other)
                with self.refused(StepOrderError):
                    cache.rewind(other, 0)
        lengths = {col: len(sequence.tokens) for col, sequence in model.items()}
        seen = dict(lengths)
        for col, position, owner in zip(plan.seq_cols, plan.positions, cols, strict=False):
            assert (col, position) == (owner, seen[col])
            seen[col] += 1
            self.put(col, position, self.next_token)
            model[col].tokens.append(self.next_token)
            self.next_token += 1
        assert plan.seq_cols[len(cols) :] == plan.positions[len(cols) :] == (0,) * (padding or 0)
        if end == "commit":
            cache.commit_step()
            cache.commit_step()
        else:
            cache.abandon_step()
            for col, n in lengths.items():
                model[col] = model[col].prefix(n)

    # --- what holds after each move

    @invariant()
    def lengths_and_floors_are_the_models(self) -> None:
        assert self.cache.live_columns == tuple(sorted(self.model))
        for col, sequence in self.model.items():
            assert self.cache.pos(col) == len(sequence.tokens)
            assert self.cache.floor(col) == sequence.floor()

    @invariant()
    def every_held_row_reads_back(self) -> None:
        for number, layer in enumerate(self.store.geometry.layers):
            rows = self.store.geometry.region_of(layer).rows
            view = self.store.layer_view(layer).numpy()
            for col, sequence in self.model.items():
                held = sequence.held(rows)
                found = view[[p % rows for p in held], col]
                value = np.array([8 * sequence.tokens[p] + number for p in held], np.float32)
                expected = np.stack([value, -value], axis=1)[:, :, None, None]
                assert (found == expected).all(), (layer, col)

    @invariant()
    def pages_are_counted_and_bounded(self) -> None:
        used = self.store.committed_pages
        assert self.cache.used_pages == used <= CONFIG.budget_bytes // PAGE
        if isinstance(self.store, FakeCudaStore):
            assert used * PAGE <= self.store.resident_bytes() <= CONFIG.budget_bytes
        if isinstance(self.store, HostStore):
            assert self.store.resident_bytes() == used * PAGE
            bound = self.store.geometry.scratch_pages * PAGE
            for sequence in self.model.values():
                for region in self.store.geometry.regions:
                    live = min(len(sequence.tokens), region.rows)
                    bound += live * region.row_bytes + PAGE
            assert used * PAGE <= bound


class HostMachine(CacheMachine):
    store_class = HostStore


class DenseMachine(CacheMachine):
    store_class = SmallDenseStore


class CudaMachine(CacheMachine):
    store_class = FakeCudaStore
    clones_cost = True


SETTINGS = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
TestHostStore = HostMachine.TestCase
TestHostStore.settings = SETTINGS
TestDenseStore = DenseMachine.TestCase
TestDenseStore.settings = SETTINGS
TestCudaStore = CudaMachine.TestCase
TestCudaStore.settings = SETTINGS
