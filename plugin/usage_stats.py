"""The cache's numbers on their way to the metrics: with vLLM's scheduler stats, once a step.

vLLM hands `SchedulerStats.kv_connector_stats`, a dictionary, to what makes metrics of it in the
front end. With columns there is never a KV connector, so the field is free.
"""

from typing import TYPE_CHECKING, NotRequired, TypedDict

from vllm_kv_columns.plugin.options import SECTION

if TYPE_CHECKING:
    from vllm_kv_columns.plugin.column_table import ColumnTable
    from vllm_kv_columns.plugin.report import UsageReport

__all__ = ["Gauges", "Payload", "UsageStats"]


class Gauges(TypedDict):
    """Values of the gauges: `bytes` of one worker by name, `columns` by state."""

    bytes: dict[str, int]
    columns: dict[str, int]


class Numbers(TypedDict):
    """What has changed.

    `added` is what the counters count since the last numbers. `emptied` is there if nothing runs
    and columns are retained: the gauges once these have been emptied, if nothing runs until then.
    """

    gauges: Gauges
    added: dict[str, int]
    emptied: NotRequired[Gauges]


Payload = dict[str, Numbers]
"""The numbers under `SECTION`."""


class UsageStats:
    """What of the columns' numbers has changed since the scheduler's last stats.

    Attributes:
        usage: the worker's last report.
    """

    def __init__(self, table: "ColumnTable") -> None:
        self.usage: UsageReport | None = None
        self._table = table
        self._told: tuple[Gauges, Gauges | None] | None = None
        self._counted: dict[str, int] = {}

    def take(self, idle: bool) -> Payload | None:
        """The numbers now; None if they are what was taken last, or no worker has reported yet.

        Args:
            idle: whether there is no request, and the workers know.
        """
        if self.usage is None:
            return None
        totals, gauges = self._totals(self.usage), self._gauges(self.usage, idle)
        emptied = self._emptied(self.usage) if idle and gauges["columns"]["retained"] else None
        if totals == self._counted and (gauges, emptied) == self._told:
            return None
        added = {name: total - self._counted.get(name, 0) for name, total in totals.items()}
        self._told, self._counted = (gauges, emptied), totals
        numbers = Numbers(gauges=gauges, added=added)
        if emptied is not None:
            numbers["emptied"] = emptied
        return {SECTION: numbers}

    def _totals(self, usage: "UsageReport") -> dict[str, int]:
        return {
            "mapped_pages": usage.store.mapped,
            "unmapped_pages": usage.store.unmapped,
            "clones": self._table.clones,
            "adoptions": self._table.adoptions,
            "evictions": self._table.evictions,
            "refused_growths": usage.refused_growths,
        }

    def _gauges(self, usage: "UsageReport", idle: bool) -> Gauges:
        store, table = usage.store, self._table
        # When nothing runs no later report tells what the store gave back by itself.
        spare = min(store.spare, store.spare_limit) if idle else store.spare
        return {
            "bytes": self._bytes(store.committed, table.pages.shared, table.pages.retained, spare),
            "columns": table.count_columns(),
        }

    def _emptied(self, usage: "UsageReport") -> Gauges:
        scratch = self._table.geometry.scratch_pages
        spare = usage.store.spare + usage.store.committed - scratch
        columns = {"running": 0, "retained": 0, "free": sum(self._table.count_columns().values())}
        return {
            "bytes": self._bytes(scratch, 0, 0, min(spare, usage.store.spare_limit)),
            "columns": columns,
        }

    def _bytes(self, committed: int, shared: int, retained: int, spare: int) -> dict[str, int]:
        page = self._table.geometry.page_size
        pages = {"committed": committed, "shared": shared, "retained": retained, "spare": spare}
        return {name: count * page for name, count in pages.items()}
