"""The errors of the cache. Each message names the offending value and the way out.

All of them pickle, so they may cross a process boundary.
"""

__all__ = [
    "CacheFullError",
    "ConfigError",
    "KVCacheError",
    "RewindError",
    "StepError",
    "StepOrderError",
    "StoreError",
    "StoreFullError",
    "UnknownColumnError",
]


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A configuration value is out of range, or two of them contradict each other."""


class StepError(KVCacheError):
    """The declared step is malformed: too many tokens or segments, a split draft block, ..."""


class RewindError(KVCacheError):
    """The wanted length is above what was written, or below what every ring still holds."""


class StoreError(KVCacheError):
    """The operating system or the allocator refused, or a store was used against its contract."""


class StoreFullError(StoreError):
    """Memory cannot be had now: the store is at its limit, or the system or driver gives no more.

    Not a misuse: the same call can succeed once pages were released, here or elsewhere.
    ``pages`` is how many the call asked for.
    """

    def __init__(self, message: str, pages: int) -> None:
        super().__init__(message, pages)
        self.pages = pages

    def __str__(self) -> str:
        return str(self.args[0])


class CacheFullError(KVCacheError):
    """Something does not fit: ``needed`` of ``unit``, of which ``free`` are there.

    ``unit`` is ``"columns"``, ``"pages"`` or ``"rows"`` (of one sequence's capacity).
    """

    def __init__(self, what: str, needed: int, free: int, unit: str, fix: str) -> None:
        super().__init__(what, needed, free, unit, fix)
        self.needed = needed
        self.free = free
        self.unit = unit

    def __str__(self) -> str:
        what, needed, free, unit, fix = self.args
        noun = unit[:-1] if needed == 1 else unit
        return f"{what} needs {needed} {noun}, {free} free; {fix}"


class StepOrderError(KVCacheError):
    """A call came at the wrong moment of declare_step, prepare_step, commit_step."""

    def __init__(self, call: str, state: str, expected: str) -> None:
        super().__init__(call, state, expected)
        self.call = call
        self.state = state
        self.expected = expected

    def __str__(self) -> str:
        call, state, expected = self.args
        return f"{call} is refused while {state}; {expected}"


class UnknownColumnError(KVCacheError):
    """No live sequence owns the column."""

    def __init__(self, col: int, live: tuple[int, ...]) -> None:
        super().__init__(col, live)
        self.col = col

    def __str__(self) -> str:
        col, live = self.args
        if col == 0:
            return "column 0 is the scratch column of padded tokens and belongs to no sequence"
        owners = ", ".join(map(str, live[:16])) if live else "none"
        more = f" and {len(live) - 16} more" if len(live) > 16 else ""
        return f"no sequence owns column {col} (live columns: {owners}{more}); take one by seq_new"
