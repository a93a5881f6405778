"""The Triton kernels on a machine without a GPU: their tests, run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", str(HERE / "test_triton_kernel.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
