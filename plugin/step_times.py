"""How long the steps of a worker waited for their rows."""

__all__ = ["StepTimes"]


class StepTimes:
    """How long steps waited until their rows were there; seconds on the host.

    Decode steps, one token for every request, are counted on their own: the time from one to the
    next in ``decode_seconds``, the wait that it contains in ``decode_prepare_seconds``.
    """

    def __init__(self) -> None:
        self.steps = self.decode_steps = 0
        self.seconds = self.decode_seconds = self.decode_prepare_seconds = 0.0
        self._longest = 0.0
        self._last: tuple[float, float] | None = None  # of the last step, if it was of decodes

    def add(self, begin: float, end: float, decodes: bool) -> None:
        """A step was prepared from one moment to another (`time.perf_counter`)."""
        took = end - begin
        self.steps += 1
        self.seconds += took
        self._longest = max(self._longest, took)
        if decodes and self._last is not None:
            earlier, its_took = self._last
            self.decode_steps += 1
            self.decode_seconds += begin - earlier
            self.decode_prepare_seconds += its_took
        self._last = (begin, took) if decodes else None

    def take(self) -> dict[str, float]:
        """All by name, and the longest wait since the last call."""
        longest, self._longest = self._longest, 0.0
        return {
            "steps": self.steps,
            "prepare_seconds": self.seconds,
            "longest_prepare_seconds": longest,
            "decode_steps": self.decode_steps,
            "decode_seconds": self.decode_seconds,
            "decode_prepare_seconds": self.decode_prepare_seconds,
        }
