"""Whose turn it is: the caller's, who never waits long, or the keeper's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Turn"]


class Turn:
    """A lock for two kinds of holders, with the time that each had it. Not reentrant.

    The keeper takes it for short pieces of work, and only while no caller wants it: with a plain
    lock a thread that lets go and takes it again at once can keep the others out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._taken = False
        self._callers = 0
        self.caller_seconds = 0.0
        """Time that callers waited for their turn and had it."""
        self.keeper_seconds = 0.0
        """Time that the keeper had its turn."""

    @property
    def wanted(self) -> bool:
        """Whether a caller waits; the keeper is to end its turn then."""
        return self._callers > 0

    @contextmanager
    def of_caller(self) -> Iterator[None]:
        began = perf_counter()
        with self._changed:
            self._callers += 1
            while self._taken:
                self._changed.wait()
            self._callers -= 1
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self.caller_seconds += perf_counter() - began
                self._changed.notify_all()

    @contextmanager
    def of_keeper(self) -> Iterator[None]:
        with self._changed:
            while self._taken or self._callers:
                self._changed.wait()
            self._taken = True
        began = perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self.keeper_seconds += perf_counter() - began
                self._changed.notify_all()
