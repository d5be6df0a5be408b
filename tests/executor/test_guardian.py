"""What a driver started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.medium,
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="what is left is found in /proc, which Linux has"),
]
ROOT = Path(__file__).parents[2]
DRIVER = """
import os, subprocess, time
from alpa_lite.executor.ray import cluster
with cluster._guarded():
    left = subprocess.Popen(["sleep", "60"])  # in place of what Ray starts
child = os.fork()
if child == 0:
    with open(os.devnull) as held:  # under the number that the child's copy of the pipe had
        if os.fork() == 0:
            os.fstat(held.fileno())
            print("fine", flush=True)
            os._exit(0)
        time.sleep(60)
time.sleep(1)
print(left.pid, child, flush=True)
time.sleep(60)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_forked_child_does_not_keep_alive_what_its_driver_started() -> None:
    """As ``multiprocessing`` forks on Linux: the child has copies of all that the driver has open."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids: list[int] = []
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "fine\n"
        left, child = pids = [int(word) for word in driver.stdout.readline().split()]
        assert runs(left) and runs(child)
        driver.kill()
        end = time.monotonic() + 20
        while runs(left) and time.monotonic() < end:
            time.sleep(0.1)
        assert not runs(left) and runs(child)
    finally:
        driver.kill()
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
        driver.communicate()
