"""Columns in the memory of a CUDA device: reserved addresses, backed extent by extent."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import ClassVar

import torch

from ...errors import StoreError, StoreFullError
from ...geometry import SCRATCH_COLUMN, CacheGeometry
from ..base import ColumnStore
from ..usage import StoreUsage
from .access import Access
from .chores import Chores
from .cuda_driver import CudaDriver
from .driver import Driver
from .extents import SIZES, ExtentPool
from .growth import Growth
from .keeper import Keeper
from .reach import Reach
from .region import CudaRegion
from .retired import RetiredColumns
from .stats import StoreStats
from .window import Window

__all__ = ["CudaVmmStore"]


class CudaVmmStore(ColumnStore):
    """One reservation per region; physical extents of 64 to 1 pages are mapped under it.

    Views never move, and a captured CUDA graph sees pages that are mapped later. Reading or
    writing rows that are not backed faults. All zeroing and copying is in the order of the
    caller's current stream; that stream (or one that waits for it) must be the one whose kernels
    use the views. Released columns stay mapped until the device is done with them and are unmapped
    by a background thread (the keeper) or when their memory is needed; spare memory beyond
    ``spare_bytes`` goes back to the driver within a fraction of a second.

    Nothing may be called while the current stream captures a graph. Calls may come from any one
    thread at a time.

    Args:
        geometry: sizes; ``page_size`` must be a multiple of the driver's granularity.
        device: torch's number of the device; None: the current one.
        driver: operations on memory; None: the CUDA driver of that device.
        spare_bytes: physical memory kept at hand for the next growth; ``trim`` applies a change
            of the attribute at once.

    Raises:
        StoreError: no usable device or driver, or a page size that it cannot map.
        StoreFullError: no memory for the scratch column.
    """

    stable_views: ClassVar[bool] = True
    per_column: ClassVar[bool] = True
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    cut_pages: ClassVar[int] = SIZES[0] - 1
    POLL_SECONDS: ClassVar[float] = 0.03
    """How often the keeper asks for events while columns are retired."""
    URGENT_ROWS: ClassVar[int] = 4
    MOST_URGENT: ClassVar[int] = 64
    """``prepare_ahead`` itself backs a column with fewer rows left, so many at most in a call."""
    MARGIN_BYTES: ClassVar[int] = 64 << 20
    """Free memory of the device that is not counted as obtainable."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        device: int | None = None,
        driver: Driver | None = None,
        spare_bytes: int = 256 << 20,
    ) -> None:
        self._closed = True  # until there is something to close
        super().__init__(geometry)
        self._driver = CudaDriver(device) if driver is None else driver
        if geometry.page_size % self._driver.granularity:
            raise StoreError(
                f"page_size is {geometry.page_size}; on this device it must be a multiple of "
                f"{self._driver.granularity}, the granularity of its driver"
            )
        self.spare_bytes = spare_bytes
        self._access = Access(self._driver)
        self._keeper = Keeper(self._tend, self._driver.enter_thread)
        self._regions: list[CudaRegion] = []
        self._reach = Reach(geometry, self._regions)
        self._retired = RetiredColumns(self._driver, self._regions)
        self._window = Window(self._driver, geometry.page_size)

        def limit() -> int:
            return self.page_limit

        self._pool = ExtentPool(self._driver, geometry.page_size, limit, self._retired)
        self._growth = Growth(self._regions, self._retired, self._pool, limit)
        self._chores = Chores(
            self._access, self._reach, self._growth, self._retired, self._pool, self._spare_to_keep
        )
        self._closed = False
        try:
            with self._access.of_caller("the store"):
                for region in geometry.regions:
                    self._regions.append(CudaRegion(region, self._driver, self._pool, self._window))
                self._write(SCRATCH_COLUMN, 0, 1)
                for made in self._regions:
                    made.open()
        except BaseException:
            self.close()
            raise
        self._region_of = {
            layer: region for region in self._regions for layer in region.geometry.layers
        }

    def layer_view(self, layer: str) -> torch.Tensor:
        self._check_open("layer_view")
        self.geometry.region_of(layer)
        return self._region_of[layer].view(layer)

    def pages_needed(self, wants: Mapping[int, tuple[int, int]]) -> int:
        self._check_open("pages_needed")
        work = {}
        for col, (start, end) in wants.items():
            if not self._reach.covers(col, start, end):
                self._check_range("pages_needed", col, start, end)
                work[col] = (start, end, self._reach.end[col])
        return sum(region.pages_needed(work) for region in self._regions) if work else 0

    def prepare_write(self, col: int, start: int, end: int) -> None:
        self.prepare_writes({col: (start, end)})

    def prepare_writes(self, wants: Mapping[int, tuple[int, int]]) -> None:
        self._begin("prepare_write")
        missing = {}
        for col, (start, end) in wants.items():
            if not self._reach.covers(col, start, end):
                self._check_range("prepare_write", col, start, end)
                missing[col] = (start, end)
            elif end > self._reach.end[col]:
                self._reach.end[col] = end
        if missing:
            with self._access.of_caller("prepare_write"):
                for col, (start, end) in missing.items():
                    self._write(col, start, end)

    def writable(self) -> Sequence[int]:
        return self._reach.ready

    def prepare_ahead(self, ends: Mapping[int, int]) -> None:
        """Let the keeper back ``pages_for(end)`` pages of each column.

        A later request for the same column takes the earlier one's place, a release or rewind
        ends it. Costs a comparison for each column that has these pages already. Where the keeper
        falls behind, the caller helps with a few columns that are almost full.
        """
        self._begin("prepare_ahead")
        asked, urgent = False, []
        for col, end in ends.items():
            if not 0 <= col < self.geometry.cols or end > self._reach.quiet[col]:
                self._check_col("prepare_ahead", col)
                self._check_range("prepare_ahead", col, 0, end)
                self._chores.requests.put(col, end)
                asked = True
                if 0 <= self._reach.ready[col] - end < self.URGENT_ROWS:
                    urgent.append(col)
        if asked:
            self._wake_keeper()
        if urgent:
            with self._access.of_caller("prepare_ahead"):
                for col in urgent[: self.MOST_URGENT]:
                    self._chores.grow_ahead(col, ends[col])

    def obtainable_pages(self) -> int:
        self._check_open("obtainable_pages")
        with self._access.looking():
            page, pool = self.geometry.page_size, self._pool
            free = max(0, self._driver.free_bytes() - self.MARGIN_BYTES) // page
            new = max(0, min(self.page_limit - pool.held_pages, free))
            surplus = sum(region.surplus(self._reach.end) for region in self._regions)
            most = max(self.page_limit, self.committed_pages)
            return min(pool.held_pages + new, most) - surplus

    def release(self, col: int) -> None:
        self.release_all((col,))

    def release_all(self, cols: Sequence[int]) -> None:
        self._begin("release")
        for col in cols:
            self._check_col("release", col)
        self._retire("release", cols, 0)

    def clone(self, src: int, dst: int, n_rows: int) -> None:
        """Maps the extents that lie wholly below ``n_rows`` in both columns, and copies the others.

        The driver maps an allocation as a whole. So what an extent of ``src`` holds below
        ``n_rows`` is copied if it goes on beyond: whole pages into extents that end with them, the
        page that ``n_rows`` divides into one behind. A ring that has wrapped is copied too. Copies
        are made in the order of the stream; they are backed here, and refused here.
        """
        self._begin("clone")
        end = self._reach.end
        self._check_clone(src, dst, n_rows, end)
        if any(region.live_pages(dst) for region in self._regions):
            self._retire("clone", (dst,), 0)  # what a refused call had gathered
        try:
            with self._access.of_caller("clone"):
                if n_rows:
                    self._growth.clone(src, dst, n_rows, end[src], self._access.stream)
                end[dst] = n_rows
                self._reach.publish(src)
                self._reach.publish(dst)
        except BaseException:
            self._retire("clone", (dst,), 0)
            self._wake_keeper()
            raise

    def shrink(self, col: int, length: int) -> None:
        """Give back whole extents beyond ``length``; rows given up in the others are zeroed."""
        self._begin("shrink")
        self._check_col("shrink", col)
        self._check_range("shrink", col, 0, length)
        beyond = any(  # also what a refused call had gathered
            region.live_pages(col) > region.geometry.pages_of(col, length)
            for region in self._regions
        )
        if beyond or length < self._reach.end[col]:
            self._retire("shrink", (col,), length)

    def trim(self) -> None:
        """Unmap what the device is done with, and give spare memory back, without the keeper."""
        self._begin("trim")
        with self._access.of_caller("trim"):
            self._chores.trim()

    def settle(self, timeout: float) -> bool:
        """Wait until the keeper has nothing left to do, retired columns included.

        False when that took longer than ``timeout`` seconds.
        """
        return self._keeper.settle(timeout)

    @property
    def committed_pages(self) -> int:
        """Pages of extents in live columns, each extent once; scratch included."""
        return sum(region.committed for region in self._regions)

    @property
    def idle_pages(self) -> tuple[int, int]:
        """Physical pages held and not in use: (spare, still mapped in retired columns)."""
        return self._pool.spare_pages, sum(region.idle for region in self._regions)

    def usage(self) -> StoreUsage:
        committed = self.committed_pages
        return StoreUsage(
            committed,
            spare=max(0, self._pool.held_pages - committed),
            spare_limit=self._spare_to_keep(),
            mapped=sum(region.mapped_pages for region in self._regions),
            unmapped=sum(region.unmapped_pages for region in self._regions),
        )

    def resident_bytes(self) -> int:
        """Bytes of all physical allocations held from the driver."""
        self._check_open("resident_bytes")
        return self._pool.held_pages * self.geometry.page_size

    def stats(self) -> StoreStats:
        """Totals of time and pages since the store was made."""
        return StoreStats(
            caller_seconds=self._access.turn.caller_seconds,
            keeper_seconds=self._access.turn.keeper_seconds,
            mapped_pages=sum(region.mapped_pages for region in self._regions),
            unmapped_pages=sum(region.unmapped_pages for region in self._regions),
            reused_pages=sum(region.reused_pages for region in self._regions),
            created_pages=self._pool.created_pages,
            released_pages=self._pool.released_pages,
            waits=self._retired.waits + self._window.waits,
        )

    def statistics(self) -> dict[str, float]:
        return asdict(self.stats())

    def close(self) -> None:
        """Wait for the device and free all memory. Tensors that are about must not be used.

        Reading them faults, since their addresses hold nothing any more; the addresses go back
        when the last of them is gone.
        """
        if self._closed:
            return
        self._closed = self._chores.stopped = True
        self._reach.close()
        self._keeper.stop()
        with self._access.looking():
            self._driver.synchronize()
            self._retired.drop_all()
            for region in self._regions:
                region.close()
            self._window.close()
            while self._pool.trim_one(0):
                pass

    def __del__(self) -> None:
        # Whoever forgot to close it gets the memory back; at the end of the process the driver
        # does that, and may be gone by now.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    # --- turns and threads

    def _begin(self, call: str) -> None:
        """What every call of the owner starts with."""
        self._check_open(call)
        failure = self._keeper.take_failure()
        if failure is not None:
            raise failure
        self._access.follow(call)

    def _wake_keeper(self) -> None:
        self._keeper.wake()

    def _tend(self) -> float | None:
        return self.POLL_SECONDS if self._chores.do_all() else None

    # --- work on columns, by whoever has the turn

    def _write(self, col: int, start: int, end: int) -> None:
        known = self._reach.end[col]
        try:
            self._growth.write(col, (start, end, known), self._access.stream)
            self._reach.end[col] = max(known, end)
        except StoreFullError:
            self._wake_keeper()  # what was gathered in vain is spare now, and may be too much
            raise
        finally:
            self._reach.publish(col)

    def _retire(self, call: str, cols: Sequence[int], length: int) -> None:
        with self._access.of_caller(call):
            for col in cols:
                self._chores.requests.drop(col)
                self._reach.end[col] = kept = min(self._reach.end[col], length)
                for region in self._regions:
                    region.retire(col, kept, self._access.stream)
                self._retired.add(col, self._access.stream)
                self._reach.publish(col)
        if len(self._retired):
            self._wake_keeper()

    def _spare_to_keep(self) -> int:
        room = self.page_limit - (self._pool.held_pages - self._pool.spare_pages)
        return max(0, min(self.spare_bytes // self.geometry.page_size, room))

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise StoreError(f"{call}: the store is closed; make a new one")
