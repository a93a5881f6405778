"""The cache's metrics on vLLM's `/metrics`, in the process of the front end."""

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_kv_columns.plugin.idle_timer import IdleTimer
from vllm_kv_columns.plugin.options import SECTION, ColumnOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kv_columns.plugin.usage_stats import Gauges, Payload

__all__ = ["BYTES", "COLUMNS", "COUNTERS", "PREFIX", "ColumnMetrics"]

PREFIX = "vllm:kv_columns_"

BYTES = {
    "committed": "Bytes of physical memory under columns, pages that several share once.",
    "shared": "Of these, bytes of pages that two or more columns have, once.",
    "retained": "Of these, bytes of pages that no running request needs.",
    "spare": "Bytes of physical memory that the store holds for reuse beside the committed ones.",
}
"""Gauges `<name>_bytes`, of one worker."""
COLUMNS = "Columns by state: running (a request's), retained (for its prefix) and free."
"""Gauge `columns` with the label `state`."""
COUNTERS = {
    "mapped_pages": "Pages put under columns, a shared page once for each column.",
    "unmapped_pages": "Pages taken from under columns, counted as the mapped ones.",
    "clones": "Columns that began as a clone of another one with the same prefix.",
    "adoptions": "Retained columns that a request with the same prefix took over.",
    "evictions": "Retained columns that were given up for another column or its pages.",
    "refused_growths": "Requests that were preempted because a worker found no memory for them.",
}
"""Counters `<name>_total`, of one worker."""


class ColumnMetrics(KVConnectorPromMetrics):
    """Gauges and counters of the columns, for all engines of this front end.

    Made by vLLM's Prometheus logger in the place of a KV connector's metrics. Gauges have no value
    before an engine's first step.

    A worker empties its retained columns when nothing has run for `retain_seconds`, and no step
    tells of it. So the numbers that hold then come with those of the last step, and are shown
    after that time.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._retain_seconds = ColumnOptions.of(vllm_config).retain_seconds
        # In multiprocess mode as vLLM's own gauges: the engine's last stats went to one front end.
        self._bytes = {
            name: self._gauge(f"{name}_bytes", text, labelnames) for name, text in BYTES.items()
        }
        self._columns = self._gauge("columns", COLUMNS, [*labelnames, "state"])
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(PREFIX + name, text, labelnames), per_engine_labelvalues
            )
            for name, text in COUNTERS.items()
        }
        self._lock = threading.Lock()
        self._timers: dict[int, IdleTimer] = {}
        self._emptied: dict[int, Gauges | None] = {}

    def _gauge(self, name: str, text: str, labelnames: list[str]) -> Any:
        return self._gauge_cls(
            PREFIX + name, text, labelnames=labelnames, multiprocess_mode="mostrecent"
        )

    def observe(self, transfer_stats_data: "Payload", engine_idx: int = 0) -> None:
        """Show an engine's numbers (`UsageStats.take`)."""
        numbers = transfer_stats_data[SECTION]
        for name, added in numbers["added"].items():
            if added:
                self._counters[name][engine_idx].inc(added)
        with self._lock:
            self._show(engine_idx, numbers["gauges"])
            if engine_idx in self._timers:
                self._timers.pop(engine_idx).stop()
            self._emptied[engine_idx] = emptied = numbers.get("emptied")
            if emptied is not None:
                action = partial(self._show_emptied, engine_idx, emptied)
                self._timers[engine_idx] = IdleTimer(self._retain_seconds, action)
                self._timers[engine_idx].start()

    def _show_emptied(self, engine: int, gauges: "Gauges") -> None:
        with self._lock:
            if self._emptied[engine] is gauges:  # else numbers came after the timer had run out
                self._show(engine, gauges)

    def _show(self, engine: int, gauges: "Gauges") -> None:
        labels = self.per_engine_labelvalues[engine]
        for name, nbytes in gauges["bytes"].items():
            self._bytes[name].labels(*labels).set(nbytes)
        for state, count in gauges["columns"].items():
            self._columns.labels(*labels, state).set(count)
