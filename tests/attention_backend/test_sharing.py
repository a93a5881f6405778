"""Processes that share a device: each is stopped in the middle of its kernels, again and again."""

import json
import subprocess
import sys

import pytest

PROCESSES, SECONDS = 8, 4.0


@pytest.mark.gpu
def test_processes_that_share_a_device_do_not_disturb_each_other() -> None:
    command = [sys.executable, "-m", "tests.attention_backend.sharing", str(SECONDS)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    answers = [(one.communicate(timeout=240), one.returncode) for one in running]
    for (printed, errors), status in answers:
        assert status == 0, errors[-2000:]
        counts = json.loads(printed.splitlines()[-1])
        assert all(runs > 0 and not others for runs, others in counts.values()), counts
