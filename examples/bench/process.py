"""Child processes that end: by themselves, or by a limit of time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["ChildError", "end_session", "ended_by_sigterm", "run_child", "session_processes"]

KEPT_LINES = 2000
SHOWN_LINES = 40


class ChildError(RuntimeError):
    """A child failed or took too long. The message ends with the last lines that it printed."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """In the block SIGTERM raises SystemExit, so that children are taken along."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def session_processes(leader: int) -> list[int]:
    """Ids of the live processes of a session, orphaned ones too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # pid (name) state ppid pgrp session ...; the name may hold spaces and brackets
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return sorted(found)


def end_session(leader: int, patience: float = 10) -> None:
    """SIGKILL to all processes of a session until none is left; gives up after some seconds."""
    until = time.monotonic() + patience
    while (left := session_processes(leader)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def run_child(
    command: Sequence[str],
    what: str,
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """Run a command to its end and return the last 2000 lines that it printed.

    It leads a session of its own, of which no process is left in the end. on_line is called from
    another thread with each line. Raises ChildError, which names ``what``, if the command ends
    with a status other than 0 or runs for longer than ``timeout`` seconds.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=KEPT_LINES)

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip())
                if on_line is not None:
                    on_line(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reason = None
    try:
        process.wait(timeout)
        if process.returncode:
            reason = f"{what} ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"{what} was not done in {timeout:.0f} s"
    finally:
        end_session(process.pid)
        process.wait()
        reader.join(5)
    if reason is not None:
        raise ChildError("\n    ".join([reason + ":", *list(lines)[-SHOWN_LINES:]]))
    return list(lines)
