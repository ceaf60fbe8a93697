"""Repeat `make test` while two other processes keep the processors busy.

A test that fails now and then fails here. The program stops its own processes, and writes each
run's time and failures to a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import results_file

# Ends by itself if this program is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep this many processors busy; the processes end with the block or with this program."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        yield


def main(runs: int, busy: int) -> int:
    """Repeat the tests, and return 1 if a run failed."""
    results = []
    # The tests start a make of their own, which must not find the one above.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MF"))}
    for number in range(1, runs + 1):
        started = time.monotonic()
        with busy_processes(busy):
            done = subprocess.run(
                ["make", "test"], capture_output=True, text=True, check=False, env=env
            )
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        counts = re.findall(r"^=+ (.*\d+ passed.*?) in ", done.stdout, re.MULTILINE)
        seconds = round(time.monotonic() - started, 1)
        results.append({"exit_code": done.returncode, "wall_s": seconds, "failed": failed})
        print(f"run {number}: {counts[-1] if counts else 'broke off'}, {seconds} s", *failed)
        if done.returncode:
            Path(f"test-often-{number}.log").write_text(done.stdout + done.stderr)
    results_file.write("tests_often", {"busy_processes": busy, "runs": results})
    return 0 if not any(result["exit_code"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
