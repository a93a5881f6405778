"""What the keeper was asked to back ahead of need."""

import threading

__all__ = ["Requests"]


class Requests:
    """For each column the end that was asked for last. Callers and keeper may use it at once."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def put(self, col: int, end: int) -> None:
        with self._lock:
            self._ends[col] = end

    def first(self) -> tuple[int, int] | None:
        """(column, end) of the oldest, which stays."""
        with self._lock:
            return next(iter(self._ends.items()), None)

    def finish(self, col: int, end: int) -> None:
        """Forget a request, unless the column was asked for anew with another end."""
        with self._lock:
            if self._ends.get(col) == end:
                del self._ends[col]

    def drop(self, col: int) -> None:
        """Forget what was asked of a column."""
        with self._lock:
            self._ends.pop(col, None)
