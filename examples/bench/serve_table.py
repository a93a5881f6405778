"""The tables of ``serve``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .workloads import OURS, Load, Workload

__all__ = ["load_table", "workload_table"]

Found = Mapping[str, Mapping[str, Any]]


def workload_table(found: Found) -> Table:
    """A row for each workload and backend; memory and waits where they were measured.

    The ratio is ours over that backend, in output tokens per second.
    """
    table = _table("requests at once", "s", "memory GiB", "2 s later", "steps waited")
    for at in _range(found, "rows"):
        for backend, row in _at(found, "rows", at):
            workload = Workload(row["requests"], row["tokens_in"], row["tokens_out"])
            waited = ""
            if "wait_share" in row:
                waited = f"{100 * row['wait_share']:.2f} %, <= {row['longest_wait_ms']:.1f} ms"
            table.add_row(
                str(workload),
                backend,
                *_rates(found, "rows", at, row),
                f"{row['seconds']:.2f}",
                _number(row.get("peak_gib")),
                _number(row.get("gib_2s_later")),
                waited,
            )
        table.add_section()
    return table


def load_table(found: Found) -> Table:
    """A row for each load and backend."""
    table = _table("requests at random (Poisson)", "TTFT ms", "P99")
    for at in _range(found, "loads"):
        for backend, row in _at(found, "loads", at):
            load = Load(row["rate"], row["requests"], row["tokens_in"], row["tokens_out"])
            table.add_row(
                str(load),
                backend,
                *_rates(found, "loads", at, row),
                _number(row["ttft_ms_mean"]),
                _number(row["ttft_ms_p99"]),
            )
        table.add_section()
    return table


def _table(title: str, *more: str) -> Table:
    table = Table(title=title)
    table.add_column("load", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("tokens/s out", "in + out", "ours / it", "ITL ms", "P99", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rates(found: Found, kind: str, at: int, row: Mapping[str, Any]) -> Sequence[str]:
    ours = dict(_at(found, kind, at)).get(OURS)
    ratio = None
    if ours is not None and ours is not row:
        ratio = ours["output_tokens_per_s"] / row["output_tokens_per_s"]
    return (
        f"{row['output_tokens_per_s']:,.1f}",
        f"{row['total_tokens_per_s']:,.1f}",
        "" if ratio is None else f"{ratio:.3f}",
        _number(row["itl_ms_mean"], 2),
        _number(row["itl_ms_p99"], 2),
    )


def _range(found: Found, kind: str) -> range:
    return range(max((len(result.get(kind, ())) for result in found.values()), default=0))


def _at(found: Found, kind: str, at: int) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (backend, result[kind][at])
        for backend, result in found.items()
        if len(result.get(kind, ())) > at
    ]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
