"""Device memory, as NVML reports it."""

import threading
import time

__all__ = ["MemorySampler"]


class MemorySampler(threading.Thread):
    """Bytes in use on device 0, 20 times a second until stopped: (seconds, bytes) pairs."""

    def __init__(self, interval: float = 0.05) -> None:
        super().__init__(daemon=True)
        from vllm.third_party import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._interval, self._ended = interval, threading.Event()
        self.samples: list[tuple[float, int]] = []

    def now(self) -> int:
        used: int = self._nvml.nvmlDeviceGetMemoryInfo(self._device).used
        return used

    def run(self) -> None:
        while not self._ended.wait(self._interval):
            self.samples.append((time.perf_counter(), self.now()))

    def stop(self) -> None:
        self._ended.set()
        self.join()
