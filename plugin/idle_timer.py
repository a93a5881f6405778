"""Something to be done once nothing has happened for a while."""

import threading
from collections.abc import Callable

__all__ = ["IdleTimer"]


class IdleTimer:
    """Calls `action` in a thread of its own when it was started and not stopped for `seconds`.

    An action that is under way when `stop` is called goes on: it must look for itself whether it
    is still wanted.
    """

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds, self._action = seconds, action
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to wait, anew if it waits already."""
        self.stop()
        self._timer = threading.Timer(self._seconds, self._action)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
