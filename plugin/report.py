"""What a worker tells the scheduler about the memory of its columns, along with a step's output."""

from dataclasses import dataclass
from typing import Any

from vllm_kv_columns.kv_manager.stores.usage import StoreUsage

__all__ = [
    "MemoryReport",
    "UsageReport",
    "attach_report",
    "attach_usage",
    "report_of",
    "usage_of",
]

ATTRIBUTE = "kv_columns_report"
"""A plain attribute of vLLM's `ModelRunnerOutput`; it survives pickling between processes."""
USAGE_ATTRIBUTE = "kv_columns_usage"
"""Another one."""


@dataclass(frozen=True)
class MemoryReport:
    """Sent with the output of a step while memory is short, after a new limit or lost columns.

    Attributes:
        refused: requests of the step that got no memory; their output means nothing.
        obtainable_pages: pages that the store holds for sequences or could have now, scratch
            column excluded; the least of all workers.
        lost: columns that a worker has emptied by itself: those of the refused requests, and all
            that were retained when nothing had run for a while.
    """

    refused: tuple[str, ...]
    obtainable_pages: int
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class UsageReport:
    """Sent for the metrics with the output of a step when it differs from what was sent last.

    Attributes:
        store: of the worker whose output the scheduler gets; all workers of a group hold as many
            pages.
        refused_growths: requests that got no memory since the worker began.
    """

    store: StoreUsage
    refused_growths: int


def attach_report(output: Any, report: MemoryReport) -> None:
    """Put the report on a `ModelRunnerOutput`, which must be nobody else's."""
    setattr(output, ATTRIBUTE, report)


def report_of(output: Any) -> MemoryReport | None:
    """The report on a `ModelRunnerOutput`, None where there is nothing to tell."""
    report: MemoryReport | None = getattr(output, ATTRIBUTE, None)
    return report


def attach_usage(output: Any, usage: UsageReport) -> None:
    """Put what the metrics need on a `ModelRunnerOutput`, which must be nobody else's."""
    setattr(output, USAGE_ATTRIBUTE, usage)


def usage_of(output: Any) -> UsageReport | None:
    """What the metrics need on a `ModelRunnerOutput`, None where nothing has changed."""
    usage: UsageReport | None = getattr(output, USAGE_ATTRIBUTE, None)
    return usage
