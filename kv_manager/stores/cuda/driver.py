"""The few operations on virtual memory that the store needs, and nothing of how they are done."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Driver"]


class Driver(ABC):
    """Virtual memory of one device.

    Sizes are bytes, addresses integers, all of them multiples of ``granularity``; streams are raw
    handles (0: the default stream). Extent and event handles are opaque. Any call can raise
    StoreError, and StoreFullError where the driver has no memory now. Calls are made between
    ``push`` and ``pop``, by one thread at a time.
    """

    granularity: int

    @abstractmethod
    def push(self) -> None:
        """Make the device's context the calling thread's."""

    @abstractmethod
    def pop(self) -> None:
        """Give the calling thread the context back that it had before ``push``."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called once by a thread that works beside one that may be capturing a graph."""

    # --- addresses and memory

    @abstractmethod
    def reserve(self, nbytes: int, alignment: int) -> int:
        """Addresses without memory."""

    @abstractmethod
    def free(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""

    @abstractmethod
    def create(self, nbytes: int) -> Any:
        """A physical allocation, not mapped. StoreFullError when there is no memory now."""

    @abstractmethod
    def release(self, extent: Any) -> None:
        """Give a physical allocation back; it must be mapped nowhere."""

    @abstractmethod
    def map(self, address: int, nbytes: int, extent: Any) -> None:
        """Put an allocation of ``nbytes`` at reserved addresses; not accessible yet.

        It may be mapped elsewhere too, but never in part: drivers refuse any other size.
        """

    @abstractmethod
    def allow(self, address: int, nbytes: int) -> None:
        """Make a range of whole mappings readable and writable."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Undo ``map`` for a range of whole mappings; no work may touch it any more."""

    @abstractmethod
    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        """Flat uint8 tensor over reserved addresses whose first page is mapped.

        ``gone`` is called when the last tensor over them is gone. The tensor is not an inference
        tensor, whatever mode is on.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Let the allocator of the process give unused memory back to the driver."""

    # --- work in the order of a stream

    @abstractmethod
    def current_stream(self) -> int:
        """The stream that the calling thread puts its work on."""

    @abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is recorded into a graph instead of done."""

    @abstractmethod
    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Fill with zeros, in the order of the stream."""

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes on the device, in the order of the stream."""

    @abstractmethod
    def record(self, stream: int) -> Any:
        """An event that is done when all work that the stream has now is."""

    @abstractmethod
    def join(self, stream: int, event: Any) -> None:
        """Later work of the stream waits for the event."""

    @abstractmethod
    def done(self, event: Any) -> bool:
        """Whether the event is done; does not wait."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Wait until the event is done."""

    @abstractmethod
    def drop(self, event: Any) -> None:
        """Destroy an event, done or not."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of the device."""
