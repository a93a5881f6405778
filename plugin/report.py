"""What a worker tells the scheduler about the memory of its columns, along with a step's output."""

from dataclasses import dataclass
from typing import Any

__all__ = ["MemoryReport", "attach_report", "report_of"]

ATTRIBUTE = "kv_columns_report"
"""A plain attribute of vLLM's `ModelRunnerOutput`; it survives pickling between processes."""


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


def attach_report(output: Any, report: MemoryReport) -> None:
    """Put the report on a `ModelRunnerOutput`, which must be nobody else's."""
    setattr(output, ATTRIBUTE, report)


def report_of(output: Any) -> MemoryReport | None:
    """The report on a `ModelRunnerOutput`, None where there is nothing to tell."""
    report: MemoryReport | None = getattr(output, ATTRIBUTE, None)
    return report
