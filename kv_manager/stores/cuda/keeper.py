"""The thread that does a store's work beside its caller."""

import threading
import weakref
from collections.abc import Callable

__all__ = ["Keeper"]


class Keeper:
    """Calls ``tend`` whenever it is woken, and again while that asks for it.

    ``tend`` (a bound method, held weakly) does the work there is and returns the seconds until it
    wants to be called again, None for not before the next ``wake``. ``enter`` is called first in
    the thread. The thread starts with the first wake, is a daemon, and waits without a timeout
    while there is nothing to do. What ``tend`` raises ends the thread and is kept in ``failure``;
    the next wake starts a new one.
    """

    def __init__(self, tend: Callable[[], float | None], enter: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._tend = weakref.WeakMethod(tend)
        self._enter = enter
        self._changed = threading.Condition()
        self._woken = 0  # wakes so far, and how many of them have been worked off
        self._seen = 0
        self._pause: float | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Say that there is something to do. Returns at once."""
        with self._changed:
            self._woken += 1
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name="kv-columns-keeper", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def settle(self, timeout: float) -> bool:
        """Wait until every wake is worked off and nothing is to be done again; False: too late."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._thread is None or (self._seen == self._woken and self._pause is None),
                timeout,
            )

    def stop(self) -> None:
        """End the thread and wait for it. Later wakes do nothing."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def take_failure(self) -> BaseException | None:
        """What ``tend`` raised, once."""
        failure, self.failure = self.failure, None
        return failure

    def _run(self) -> None:
        try:
            self._enter()
            while self._wait():
                with self._changed:
                    woken = self._woken
                tend = self._tend()
                if tend is None:
                    return
                pause = tend()
                del tend
                with self._changed:
                    self._seen, self._pause = woken, pause
                    self._changed.notify_all()
        except BaseException as error:
            self.failure = error
        finally:
            with self._changed:
                self._seen, self._pause, self._thread = self._woken, None, None
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Until there is something to do; False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._seen != self._woken, timeout=self._pause
            )
            return not self._stopping
