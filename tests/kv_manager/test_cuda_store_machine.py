"""Random use of cuda-vmm under refusals, on a device that lags behind, against plain lists.

Bytes are written and compared by queued kernels, as on a device: a kernel compares with what the
model said when it was launched, and does so whenever the queue gets there. The driver fails when
memory is taken away under a kernel that is still queued.
"""

import gc
from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_kv_columns.kv_manager import StoreFullError

from .builders import PAGE
from .fake_driver import FakeDriver
from .test_cuda_store import QuietStore, one_group

ROWS_PER_PAGE = 4
COLUMNS = st.integers(1, 6)
GEOMETRY = one_group(90, capacity=300, ahead_rows=2)


class CudaStoreMachine(RuleBasedStateMachine):
    @initialize(spare=st.sampled_from([0, 5, 200]))
    def start(self, spare: int) -> None:
        self.driver = FakeDriver(lag=True, capacity=120 * PAGE)
        self.store = QuietStore(GEOMETRY, driver=self.driver, spare_bytes=spare * PAGE)
        self.model: dict[int, list[int]] = {col: [] for col in range(1, 7)}
        self.dirty = dict.fromkeys(self.model, 0)  # rows that may hold what a rewind gave up
        self.next_value = 1
        self.wrong: list[str] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.driver.advance()
            assert not self.wrong
            self.store.close()
            del self.store
            gc.collect()
            self.driver.assert_clean()

    def rows(self, col: int, start: int, end: int) -> torch.Tensor:
        return self.store.layer_view("a")[start:end, col]

    def check(self, col: int, start: int, values: list[int], why: str) -> None:
        """Queue a kernel that compares rows from ``start`` on."""
        if not values:
            return
        rows = self.rows(col, start, start + len(values))
        expected = torch.tensor(values, dtype=torch.float32)

        def compare() -> None:
            if not bool((rows == expected[:, None, None, None]).all()):
                self.wrong.append(f"{why}: column {col} from row {start} on")

        self.driver.launch(rows, compare)

    def attempt(self, call: Callable[[], None], missing: int) -> bool:
        """Whether the store found memory; it may only refuse with a reason."""
        before, held = self.store.committed_pages, self.driver.held
        try:
            call()
        except StoreFullError:
            limited = before + missing > self.store.page_limit
            short = self.driver.free_bytes() < missing * PAGE
            assert limited or short or self.driver.refuse_after == 0
            assert self.store.committed_pages >= before or self.driver.held >= held
            return False
        return True

    @rule(col=COLUMNS, count=st.integers(1, 150), quick=st.booleans())
    def write(self, col: int, count: int, quick: bool) -> None:
        sequence = self.model[col]
        start = len(sequence)
        end = min(start + (1 if quick else count), GEOMETRY.capacity)
        if not self.prepare(col, start, end):
            return
        assert self.store.pages_needed({col: (start, end)}) == 0
        clean = max(start, self.dirty[col])
        self.check(col, clean, [0] * (end - clean), "new rows are zero")
        self.put(col, start, end)
        self.dirty[col] = max(self.dirty[col], end)

    def prepare(self, col: int, start: int, end: int) -> bool:
        store = self.store
        missing, before = store.pages_needed({col: (start, end)}), store.committed_pages
        promised = end <= store.writable()[col] and start >= len(self.model[col])
        assert not (promised and missing)
        as_it_is = not store.idle_pages[1]
        if not self.attempt(lambda: store.prepare_write(col, start, end), missing):
            return False
        assert not as_it_is or store.committed_pages == before + missing
        return True

    def put(self, col: int, start: int, end: int) -> None:
        """Queue kernels that write the rows, each with a value of its own."""
        for position in range(start, end):
            row, value = self.rows(col, position, position + 1), self.next_value
            self.model[col][position : position + 1] = [value]
            self.driver.launch(row, lambda row=row, value=value: row.fill_(value))  # type: ignore[misc]
            self.next_value += 1

    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        """Without a rewind first."""
        col = self.some(data, empty=False)
        if col is not None:
            length = len(self.model[col])
            start = data.draw(st.integers(0, length - 1), label="start")
            end = data.draw(st.integers(start + 1, min(length, start + 9)), label="end")
            if self.prepare(col, start, end):
                self.put(col, start, end)

    @rule(data=st.data(), count=st.integers(1, 30))
    def go_back_and_write(self, data: st.DataObject, count: int) -> None:
        col = self.some(data, empty=False)
        if col is not None:
            self.shrink(col, data)
            self.write(col, count, False)

    @rule(col=COLUMNS, more=st.integers(0, 20), times=st.integers(0, 3))
    def hint(self, col: int, more: int, times: int) -> None:
        end = min(len(self.model[col]) + more, GEOMETRY.capacity)
        if self.model[col]:
            self.store.prepare_ahead({col: end})
            before = self.store.committed_pages
            for _ in range(times):
                self.store.tend()
            grown = self.store.committed_pages - before
            assert grown <= sum(GEOMETRY.pages_for(len(s) + 20) for s in self.model.values() if s)

    @rule()
    def tend(self) -> None:
        self.store.tend()

    @rule(col=COLUMNS)
    def release(self, col: int) -> None:
        self.store.release(col)
        self.model[col], self.dirty[col] = [], 0

    @rule(col=COLUMNS, data=st.data())
    def shrink(self, col: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.model[col])), label="length")
        self.store.shrink(col, length)
        if length < len(self.model[col]):
            del self.model[col][length:]
            self.dirty[col] = -(-length // ROWS_PER_PAGE) * ROWS_PER_PAGE

    def some(self, data: st.DataObject, *, empty: bool) -> int | None:
        cols = [col for col, sequence in self.model.items() if empty == (not sequence)]
        return data.draw(st.sampled_from(cols), label="column") if cols else None

    @rule(data=st.data())
    def clone(self, data: st.DataObject) -> None:
        src, dst = self.some(data, empty=False), self.some(data, empty=True)
        if src is not None and dst is not None:
            self.clone_to(src, dst, self.prefix(src, data))

    def prefix(self, src: int, data: st.DataObject) -> int:
        length = len(self.model[src])
        return data.draw(st.just(length) | st.integers(0, length), label="rows")

    def clone_to(self, src: int, dst: int, n: int) -> bool:
        missing, held = self.store.pages_needed({dst: (0, n)}), self.store.committed_pages
        if not self.attempt(lambda: self.store.clone(src, dst, n), missing):
            assert self.store.committed_pages <= held and not self.store.live_pages(dst)
            return False
        self.model[dst] = self.model[src][:n]
        self.dirty[dst] = -(-n // ROWS_PER_PAGE) * ROWS_PER_PAGE
        return True

    @rule(data=st.data())
    def clone_twice(self, data: st.DataObject) -> None:
        """A clone of a clone as long as that has its whole pages in common with it."""
        src = self.some(data, empty=False)
        empty = [col for col, sequence in self.model.items() if not sequence]
        if src is not None and len(empty) > 1:
            n = self.prefix(src, data)
            self.store.release(empty[1])  # what a refused call had gathered
            if self.clone_to(src, empty[0], n):
                before = self.store.committed_pages
                if self.clone_to(empty[0], empty[1], n):
                    new = GEOMETRY.pages_for(n) - n // ROWS_PER_PAGE
                    assert self.store.committed_pages == before + new

    @rule(data=st.data(), rows=st.integers(1, 9))
    def fork(self, data: st.DataObject, rows: int) -> None:
        """Give some empty columns prefixes of one, each with a continuation of its own."""
        src = self.some(data, empty=False)
        if src is not None:
            for dst in [col for col, sequence in self.model.items() if not sequence][:2]:
                self.clone_to(src, dst, self.prefix(src, data))
                self.write(dst, rows, False)

    def distinct_pages(self) -> int:
        """Pages that no two columns can have in common; values are never used twice.

        Those of which a rewind left the first rows may still be others' too.
        """
        pages = {
            tuple(sequence[row : row + ROWS_PER_PAGE])
            for sequence in self.model.values()
            for row in range(0, len(sequence), ROWS_PER_PAGE)
        }
        longer = {page[:n] for page in pages for n in range(1, len(page))}
        return len(pages - longer)

    @rule(count=st.none() | st.integers(1, 40))
    def device_goes_on(self, count: int | None) -> None:
        self.driver.advance(None if count is None else min(count, len(self.driver.queued)))
        assert not self.wrong

    @rule(pages=st.integers(0, 110))
    def neighbour(self, pages: int) -> None:
        self.driver.neighbour = min(pages * PAGE, self.driver.free_bytes() + self.driver.neighbour)
        self.driver.cached = self.driver.neighbour // (2 * PAGE) * PAGE

    @rule(after=st.none() | st.integers(0, 4))
    def refuse(self, after: int | None) -> None:
        self.driver.refuse_after = after

    @rule(limit=st.none() | st.integers(2, 90))
    def limit(self, limit: int | None) -> None:
        self.store.limit_pages = limit

    @rule()
    def stream(self) -> None:
        self.driver.stream += 1

    @rule()
    def read_all(self) -> None:
        for col, sequence in self.model.items():
            self.check(col, 0, sequence, "rows keep their bytes")

    @invariant()
    def memory_is_counted_and_bounded(self) -> None:
        store = self.store
        assert self.driver.held == store.resident_bytes()
        spare, idle = store.idle_pages
        assert store.resident_bytes() == (store.committed_pages + spare + idle) * PAGE
        assert store.resident_bytes() <= 90 * PAGE
        live = 1 + self.distinct_pages()
        assert live <= store.committed_pages
        assert live <= store.obtainable_pages()


TestCudaStoreMachine = CudaStoreMachine.TestCase
TestCudaStoreMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
