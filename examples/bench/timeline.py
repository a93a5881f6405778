"""Memory over time while waves of requests are served. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .workloads import Workload

__all__ = ["CACHE", "DEVICE", "Timeline", "Wave"]

CACHE = "KV cache"
DEVICE = "device memory in use (NVML)"


@dataclass(frozen=True)
class Wave:
    """Requests that came at once. begin, end: seconds, from the first request to the last token."""

    workload: Workload
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Samples of one backend, all three lists of the same length.

    measured: what ``used`` counts, CACHE or DEVICE. token_bytes: of the K and V of a token in all
    layers. idle: bytes before the first wave. seconds: from the first sample on. used: bytes.
    live_tokens: of running requests in the cache; a prompt counts from its first answer on.
    """

    measured: str
    token_bytes: int
    idle: int
    seconds: Sequence[float]
    used: Sequence[int]
    live_tokens: Sequence[int]
    waves: Sequence[Wave]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Timeline":
        """From what ``dataclasses.asdict`` made of one."""
        waves = [
            Wave(**{**wave, "workload": Workload(**wave["workload"])}) for wave in found["waves"]
        ]
        return cls(**{**found, "waves": waves})

    @property
    def live(self) -> list[int]:
        """Bytes of the live tokens."""
        return [tokens * self.token_bytes for tokens in self.live_tokens]

    def samples(self, number: int) -> range:
        """Of a wave and the pause behind it."""
        begin = self.waves[number].begin
        last = number + 1 == len(self.waves)
        inside = [
            at
            for at, seconds in enumerate(self.seconds)
            if seconds >= begin and (last or seconds < self.waves[number + 1].begin)
        ]
        return range(inside[0], inside[-1] + 1) if inside else range(0)
