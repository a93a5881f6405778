"""The processes that measure a backend, and what they hand back."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .engine import Engine
from .offline import ENDED, ROW
from .process import ChildError, run_child
from .server import ENVIRONMENT, serving
from .timeline import Timeline
from .workloads import Load, Workload

__all__ = ["load_server", "serve_loads", "serve_waves", "serve_workloads"]

OnRow = Callable[[Mapping[str, Any]], None]


def serve_workloads(
    engine: Engine, workloads: Sequence[Workload], rounds: int, timeout: float, on_row: OnRow
) -> dict[str, Any]:
    """Rows of the workloads in "rows", from an engine in a child process. Raises ChildError."""
    plan = {
        "engine": asdict(engine),
        "workloads": [asdict(workload) for workload in workloads],
        "rounds": rounds,
    }
    rows, ended = _run("offline", json.dumps(plan), engine.backend, timeout, on_row)
    return {"rows": rows, **ended}


def serve_waves(
    engine: Engine, waves: Sequence[Workload], pause: float, timeout: float, on_wave: OnRow
) -> Timeline:
    """Memory while waves are served, with so many idle seconds behind each. Raises ChildError."""
    plan = {
        "engine": asdict(engine),
        "waves": [asdict(wave) for wave in waves],
        "pause": pause,
    }
    _, ended = _run("waves", json.dumps(plan), engine.backend, timeout, on_wave)
    return Timeline.from_json(ended)


def serve_loads(
    engine: Engine, loads: Sequence[Load], timeout: float, on_row: OnRow
) -> list[dict[str, Any]]:
    """Rows of the loads, from vLLM's API server and ``vllm bench serve``.

    The server is stopped however this ends. Raises ChildError, which ends with what the client
    printed and what the server printed, if requests fail or time is up; ServerStartError if the
    server does not start in ``timeout`` seconds.
    """
    with serving(engine.model, *engine.flags(), timeout=timeout) as server:
        try:
            return load_server(
                server.url, engine.model, loads, timeout, on_row, what=engine.backend
            )
        except ChildError as error:
            log = "\n    ".join(["its server printed:", *server.log()[-30:]])
            raise ChildError(f"{error}\n{log}") from error


def load_server(
    url: str,
    model: str,
    loads: Sequence[Load],
    timeout: float,
    on_row: OnRow,
    *,
    name: str | None = None,
    what: str = "server",
) -> list[dict[str, Any]]:
    """Rows of the loads on a server that runs, from ``vllm bench serve``.

    model: the folder, for its tokenizer. name: that the server gives the model, if another. Raises
    ChildError, with ``what`` in front, if a request fails or time is up.
    """
    arguments = [_client(url, model, name or model, load) for load in loads]
    rows, _ = _run("load", json.dumps(arguments), what, timeout, on_row)
    for row, load in zip(rows, loads, strict=True):
        if row["completed"] != load.requests:
            raise ChildError(
                f"{what}: {row['completed']} of {load.requests} requests came to an end at "
                f"{load.rate:g}/s; the first error: {row['error']}"
            )
    return [{**asdict(load), **row} for load, row in zip(loads, rows, strict=True)]


def _client(url: str, model: str, name: str, load: Load) -> list[str]:
    """Arguments of ``vllm bench serve``."""
    return [
        *("--backend", "openai"),
        *("--base-url", url),
        *("--model", name),
        *("--tokenizer", model),
        *("--dataset-name", "random"),
        *("--input-len", str(load.tokens_in)),
        *("--output-len", str(load.tokens_out)),
        *("--num-prompts", str(load.requests)),
        *("--request-rate", str(load.rate)),
        *("--temperature", "0"),
        *("--num-warmups", "4"),
        *("--percentile-metrics", "ttft,tpot,itl"),
        *("--metric-percentiles", "99"),
        *("--seed", "0"),
        "--ignore-eos",
        "--disable-tqdm",
        "--save-detailed",  # or it forgets what failed requests said
    ]


def _run(
    module: str, argument: str, what: str, timeout: float, on_row: OnRow
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ended: dict[str, Any] = {}

    def take(line: str) -> None:
        if line.startswith(ROW):
            rows.append(json.loads(line.removeprefix(ROW)))
            on_row(rows[-1])
        elif line.startswith(ENDED):
            ended.update(json.loads(line.removeprefix(ENDED)))

    command = [sys.executable, "-m", f"{__package__}.{module}", argument]
    run_child(command, f"{what}, {module}", timeout, env=ENVIRONMENT, on_line=take)
    return rows, ended
