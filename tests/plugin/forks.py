"""Engines as forks of one process that has imported vLLM, which takes longer than the tiny models.

`python -m tests.plugin.forks`: each line of the input is {"job": FILE, "env": variables}, each line
of the output the status with which the engine of that job ended. A fork begins where `engine.py`
stands after its imports, with no plugin loaded and no thread started, and ends as any process does.
"""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Forks:
    """The process that forks, from the side of the tests. One engine runs at a time."""

    def __init__(self, log: Path) -> None:
        self._lock = threading.Lock()
        self._log = log
        with log.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.plugin.forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                # OpenBLAS starts threads when numpy is imported; the engines compute with torch.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def run(self, path: Path, env: dict[str, str]) -> int:
        """The status of the job's engine; what it printed is in FILE.log."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"job": str(path), "env": env}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"no engine can be forked:\n{self._log.read_text()[-6000:]}"
        return int(answer)

    def close(self) -> None:
        """The process ends, and with it an engine that still runs."""
        with self._process:
            self._process.kill()


def die_with_parent() -> None:
    import ctypes

    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


def main() -> None:
    from tests.plugin import engine  # sets the environment for vLLM, too

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM  # noqa: F401 forks find it imported

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads; a fork has one and may wait for the others"
    loaded = [name for name in sys.modules if name.startswith("vllm_kv_columns")]
    assert not loaded, f"loaded before an engine asked for plugins: {loaded}"
    gc.freeze()
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        if not os.fork():
            break
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    else:
        return
    die_with_parent()
    path = Path(job["job"])
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    del os.environ["OPENBLAS_NUM_THREADS"]
    os.environ |= job["env"]
    engine.main(path)


if __name__ == "__main__":
    main()
