"""The table of ``memory``."""

from collections.abc import Mapping

from rich.table import Table

from .timeline import Timeline

__all__ = ["memory_table"]

MIB = 1 << 20


def memory_table(found: Mapping[str, Timeline]) -> Table:
    """A row for each wave of each backend: MiB at most while it ran, and at the pause's end.

    Live tokens are what they take at most; both peaks need not come at the same time.
    """
    measured = ", ".join(dict.fromkeys(timeline.measured for timeline in found.values()))
    table = Table(title=f"{measured}, MiB")
    for name in ("backend", "wave"):
        table.add_column(name, no_wrap=True)
    for name in ("idle before", "at most", "live tokens", "after the pause"):
        table.add_column(name, justify="right", no_wrap=True)
    for backend, timeline in found.items():
        for number, wave in enumerate(timeline.waves):
            at = timeline.samples(number)
            used, live = ([series[i] for i in at] for series in (timeline.used, timeline.live))
            table.add_row(
                backend,
                str(wave.workload),
                _mib(timeline.idle),
                _mib(max(used, default=None)),
                _mib(max(live, default=None)),
                _mib(used[-1] if used else None),
            )
        table.add_section()
    return table


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.1f}"
