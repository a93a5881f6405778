"""Memory as the system reports it, and a thread that reads something over and over."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Sampler", "device_memory"]

T = TypeVar("T")


def device_memory() -> Callable[[], int]:
    """What reads the bytes in use on device 0, of all processes together, from NVML."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used() -> int:
        found: int = pynvml.nvmlDeviceGetMemoryInfo(device).used
        return found

    return used


class Sampler(threading.Thread, Generic[T]):
    """Reads, every ``interval`` seconds until stopped: (time.perf_counter(), value) pairs."""

    def __init__(self, read: Callable[[], T], interval: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._read, self._interval, self._ended = read, interval, threading.Event()
        self._error: Exception | None = None
        self.samples: list[tuple[float, T]] = []

    def now(self) -> T:
        return self._read()

    def run(self) -> None:
        try:
            while not self._ended.wait(self._interval):
                self.samples.append((time.perf_counter(), self._read()))
        except Exception as error:  # raised again by stop
            self._error = error

    def stop(self) -> None:
        """Raises what a reading raised."""
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error
