"""A driver on memfd and mmap with real bytes, and a model of a device that works behind.

Work is queued and done when a test says so (``lag``) or at once. It fails loudly when work that is
still queued touches what is being unmapped, and on every wrong use of memory. Fresh memory is
full of junk. Failures are AssertionErrors, which no code under test catches; a mapping of a part of
an allocation is refused as the CUDA driver refuses it.
"""

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kv_columns.kv_manager import StoreError, StoreFullError
from vllm_kv_columns.kv_manager.stores import libc
from vllm_kv_columns.kv_manager.stores.cuda import Driver

JUNK = 0xA5
Range = tuple[int, int]  # address, bytes


@dataclass(eq=False)
class FakeExtent:
    fd: int
    nbytes: int
    mappings: int = 0
    released: bool = False


@dataclass(eq=False)
class FakeMapping:
    extent: FakeExtent
    address: int
    nbytes: int


@dataclass(eq=False)
class FakeEvent:
    after: int  # it is done when so much work of all is
    dropped: bool = False


@dataclass
class Work:
    what: str
    ranges: list[Range]
    run: Callable[[], object]


class FakeDriver(Driver):
    """``capacity`` bytes are shared with ``neighbour`` bytes, ``cached`` of them torch's cache."""

    def __init__(
        self,
        *,
        granularity: int = 4096,
        capacity: int = 1 << 40,
        neighbour: int = 0,
        cached: int = 0,
        lag: bool = False,
    ) -> None:
        self.granularity = granularity
        self.capacity, self.neighbour, self.cached = capacity, neighbour, cached
        self.lag = lag
        self.refuse_after: int | None = None  # creations that still succeed
        self.fail_next: dict[str, Exception] = {}
        self.stream = 7
        self.capturing = False
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, int]] = []  # call, bytes
        self.threads: dict[str, set[str]] = {}
        self.held = 0
        self._depth = threading.local()
        self._lock = threading.RLock()
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, FakeMapping] = {}
        self._allowed: set[int] = set()
        self._extents: set[FakeExtent] = set()
        self._events: set[FakeEvent] = set()
        self._queue: list[Work] = []
        self._done = 0

    # --- for tests

    @property
    def queued(self) -> list[str]:
        return [work.what for work in self._queue]

    def advance(self, count: int | None = None) -> None:
        """Do the oldest ``count`` works, None: all."""
        with self._lock:
            for _ in range(len(self._queue) if count is None else count):
                self._check_access(self._queue[0])
                self._queue.pop(0).run()
                self._done += 1

    def launch(self, tensor: torch.Tensor, run: Callable[[], object]) -> None:
        """A kernel that touches a contiguous tensor."""
        assert tensor.is_contiguous()
        self._submit("kernel", [(tensor.data_ptr(), tensor.nbytes)], run)

    def assert_clean(self) -> None:
        """Nothing that was taken is still held; tensors must be gone."""
        assert not self._extents, f"{len(self._extents)} extents were not released"
        assert not self._mapped, f"{len(self._mapped)} mappings are left"
        assert not self._events, f"{len(self._events)} events are left"
        assert not self._reserved, f"{len(self._reserved)} reservations are left"

    # --- contexts

    def push(self) -> None:
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def pop(self) -> None:
        self._depth.value -= 1
        assert self._depth.value >= 0

    def enter_thread(self) -> None:
        self._count("enter_thread")

    def _count(self, call: str, nbytes: int = 0) -> None:
        self.calls[call] += 1
        self.log.append((call, nbytes))
        self.threads.setdefault(call, set()).add(threading.current_thread().name)
        if call in self.fail_next:
            raise self.fail_next.pop(call)

    def _enter(self, call: str, nbytes: int = 0) -> None:
        assert getattr(self._depth, "value", 0) == 1, f"{call}: the context was not pushed once"
        self._count(call, nbytes)

    # --- addresses and memory

    def reserve(self, nbytes: int, alignment: int) -> int:
        self._enter("reserve", nbytes)
        assert nbytes % self.granularity == alignment % self.granularity == 0
        address = libc.reserve(nbytes)
        self._reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self._reserved.pop(address) == nbytes
        assert not any(address <= at < address + nbytes for at in self._mapped), "still mapped"
        libc.unmap(address, nbytes)

    def create(self, nbytes: int) -> FakeExtent:
        with self._lock:
            self._enter("create", nbytes)
            assert nbytes % self.granularity == 0
            if self.refuse_after is not None:
                if self.refuse_after == 0:
                    raise StoreFullError("create refused", 0)
                self.refuse_after -= 1
            if nbytes > self.free_bytes():
                raise StoreFullError("create refused: no memory", 0)
            fd = os.memfd_create("fake extent")
            os.write(fd, bytes([JUNK]) * nbytes)
            extent = FakeExtent(fd, nbytes)
            weakref.finalize(extent, os.close, fd)
            self._extents.add(extent)
            self.held += nbytes
            return extent

    def release(self, extent: FakeExtent) -> None:
        with self._lock:
            self._enter("release", extent.nbytes)
            assert not extent.mappings, "an extent is released while it is mapped"
            assert not extent.released, "an extent is released twice"
            extent.released = True
            self._extents.remove(extent)
            self.held -= extent.nbytes

    def map(self, address: int, nbytes: int, extent: FakeExtent) -> None:
        with self._lock:
            self._enter("map", nbytes)
            assert not extent.released, "a released extent is mapped"
            if nbytes != extent.nbytes:
                raise StoreError(f"cuMemMap of {nbytes} bytes failed: CUDA_ERROR_NOT_SUPPORTED")
            base = max(b for b in self._reserved if b <= address)
            assert address + nbytes <= base + self._reserved[base], "beyond the reservation"
            assert (address - base) % self.granularity == 0
            for at, other in self._mapped.items():
                assert at + other.nbytes <= address or address + nbytes <= at, "address is taken"
            extent.mappings += 1
            self._mapped[address] = FakeMapping(extent, address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._enter("allow", nbytes)
            for mapping in self._whole(address, nbytes):
                self._allowed.add(mapping.address)
                libc.map_file(mapping.address, mapping.nbytes, mapping.extent.fd, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._enter("unmap", nbytes)
            for work in self._queue:
                for start, size in work.ranges:
                    assert start + size <= address or address + nbytes <= start, (
                        f"{work.what} that is still queued touches what is being unmapped"
                    )
            for mapping in self._whole(address, nbytes):
                libc.reserve_again(mapping.address, mapping.nbytes)
                self._allowed.discard(mapping.address)
                del self._mapped[mapping.address]
                mapping.extent.mappings -= 1

    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        assert address in self._allowed, "the first page is not mapped"
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, gone).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)

    def free_bytes(self) -> int:
        return self.capacity - self.held - self.neighbour

    def empty_cache(self) -> None:
        self._enter("empty_cache")
        self.neighbour -= self.cached
        self.cached = 0

    def _whole(self, address: int, nbytes: int) -> list[FakeMapping]:
        """The mappings in a range, which they must fill exactly."""
        mappings, at = [], address
        while at < address + nbytes:
            assert at in self._mapped, "not a range of whole mappings"
            mappings.append(self._mapped[at])
            at += mappings[-1].nbytes
        assert at == address + nbytes, "cuts a mapping"
        return mappings

    # --- work in the order of the one queue that all streams share

    def current_stream(self) -> int:
        return self.stream

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self._enter("zero", nbytes)
        self._submit("zero", [(address, nbytes)], lambda: ctypes.memset(address, 0, nbytes))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._enter("copy", nbytes)
        ranges = [(to, nbytes), (source, nbytes)]
        self._submit("copy", ranges, lambda: ctypes.memmove(to, source, nbytes))

    def record(self, stream: int) -> FakeEvent:
        self._enter("record")
        with self._lock:
            event = FakeEvent(self._done + len(self._queue))
            self._events.add(event)
            return event

    def join(self, stream: int, event: FakeEvent) -> None:
        self._enter("join")
        assert not event.dropped

    def done(self, event: FakeEvent) -> bool:
        self._enter("done")
        assert not event.dropped
        return self._done >= event.after

    def wait(self, event: FakeEvent) -> None:
        self._enter("wait")
        with self._lock:
            self.advance(max(0, event.after - self._done))

    def drop(self, event: FakeEvent) -> None:
        self._enter("drop")
        self._events.remove(event)
        event.dropped = True

    def synchronize(self) -> None:
        self._enter("synchronize")
        self.advance()

    def _submit(self, what: str, ranges: list[Range], run: Callable[[], object]) -> None:
        with self._lock:
            work = Work(what, ranges, run)
            self._check_access(work)
            self._queue.append(work)
            if not self.lag:
                self.advance()

    def _check_access(self, work: Work) -> None:
        """Every byte must be mapped and allowed, when work is queued and when it is done."""
        for start, nbytes in work.ranges:
            at = start
            while at < start + nbytes:
                base = max((b for b in self._allowed if b <= at), default=None)
                assert base is not None, f"{work.what} touches memory that is not accessible"
                end = base + self._mapped[base].nbytes
                assert at < end, f"{work.what} touches memory that is not accessible"
                at = end
