"""Who works on a store, and on which stream: its owner, or the keeper in the background."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import StoreError
from .driver import Driver
from .turn import Turn

__all__ = ["Access"]


class Access:
    """Turns of the owner and of the keeper in the driver's context.

    ``stream`` is the owner's: zeroing and copying go there, whoever has the turn.
    """

    def __init__(self, driver: Driver) -> None:
        self.turn = Turn()
        self.stream = driver.current_stream()
        self._driver = driver

    @contextmanager
    def of_caller(self, call: str) -> Iterator[None]:
        """A turn in which memory may change. Raises StoreError while the stream is capturing."""
        with self.looking():
            if self._driver.is_capturing(self.stream):
                raise StoreError(
                    f"{call}: the current stream is capturing a graph, and memory must not change "
                    f"meanwhile; prepare the columns before the capture"
                )
            yield

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A turn of the owner in which nothing changes that a graph could hold."""
        with self.turn.of_caller(), self._context():
            yield

    @contextmanager
    def of_keeper(self) -> Iterator[None]:
        with self.turn.of_keeper(), self._context():
            yield

    def follow(self, call: str) -> None:
        """If the owner goes on with another stream, that is to see what was zeroed on the last."""
        stream = self._driver.current_stream()
        if stream == self.stream:
            return
        earlier, self.stream = self.stream, stream
        try:
            with self.of_caller(call):
                event = self._driver.record(earlier)
                self._driver.join(stream, event)
                self._driver.drop(event)
        except BaseException:
            self.stream = earlier
            raise

    @contextmanager
    def _context(self) -> Iterator[None]:
        self._driver.push()
        try:
            yield
        finally:
            self._driver.pop()
