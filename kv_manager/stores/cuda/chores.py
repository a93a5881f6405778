"""What is done beside the caller: growth ahead of need, and memory on its way back."""

from collections.abc import Callable

from .access import Access
from .extents import ExtentPool
from .growth import Growth
from .reach import Reach
from .requests import Requests
from .retired import RetiredColumns

__all__ = ["Chores"]


class Chores:
    """The keeper's work. Each piece has a turn of its own, so that no caller waits long.

    ``keep``: spare pages that do not go back to the driver, as of now.
    """

    def __init__(
        self,
        access: Access,
        reach: Reach,
        growth: Growth,
        retired: RetiredColumns,
        pool: ExtentPool,
        keep: Callable[[], int],
    ) -> None:
        self.requests = Requests()
        self.stopped = False
        self._access = access
        self._reach = reach
        self._growth = growth
        self._retired = retired
        self._pool = pool
        self._keep = keep

    def do_all(self) -> bool:
        """Do what there is; whether columns are left whose events are to be asked for again."""
        while self.requests and not self.stopped:
            with self._access.of_keeper():
                while not (self.stopped or self._access.turn.wanted):
                    request = self.requests.first()
                    if request is None:
                        break
                    self.grow_ahead(*request)
        more = True
        while more and not self.stopped:
            with self._access.of_keeper():
                more = self._retired.collect_some() or self._pool.trim_one(self._keep())
        return len(self._retired) > 0

    def grow_ahead(self, col: int, end: int) -> None:
        """One piece of work for a request, by whoever has the turn."""
        try:
            more = self._growth.grow_a_little(col, end, self._access.stream)
        finally:
            self._reach.publish(col)
        if not more:
            self.requests.finish(col, end)

    def trim(self) -> None:
        """Unmap what the device is done with and give back what is spare, by who has the turn."""
        self._retired.collect(None)
        while self._pool.trim_one(self._keep()):
            pass
