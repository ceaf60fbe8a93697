"""Fork programs from interpreters that have imported torch, which takes seconds, only once."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
# A test file that is run as a program imports its neighbours.
IMPORT_PATH = str(Path(__file__).resolve().parents[2])


class Zygotes:
    """One interpreter for each kind, started when it is first asked for.

    Not for several threads. What it has started ends with `close`, or with this process.
    """

    def __init__(self) -> None:
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        for zygote in self._started.values():
            assert zygote.stdin is not None and zygote.stdout is not None
            zygote.stdin.close()
            zygote.wait()
            zygote.stdout.close()
        self._started.clear()

    def run(
        self,
        program: str,
        *arguments: str,
        stdout: Path,
        stderr: Path,
        timeout_s: float,
        env: dict[str, str] | None = None,
        preload: str = "torch",
        quick_end: bool = False,
    ) -> int:
        """Run Python source in a child of the interpreter that has imported ``preload``.

        Args:
            stdout, stderr: Files that are there already.
            timeout_s: After this it is killed.
            env: What is changed in its environment, once it has been forked.
            quick_end: Put its heap aside after the last of its exit callbacks. Walking all of
                torch some five times is the most that the end of such a program costs.

        Returns:
            The exit code, negative for a signal.
        """
        how: dict[str, Any] = {"env": env, "preload": preload, "quick_end": quick_end}
        pid = self.start(program, *arguments, stdout=stdout, stderr=stderr, **how)
        zygote = self._started[preload]
        assert zygote.stdout is not None
        if not select.select([zygote.stdout], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
        return self.wait(preload)

    def start(
        self,
        program: str,
        *arguments: str,
        stdout: Path,
        stderr: Path,
        env: dict[str, str] | None = None,
        preload: str = "torch",
        quick_end: bool = False,
    ) -> int:
        """Start a program and return its process id; `wait` must be called before the next."""
        zygote = self._started.get(preload) or self._start(preload)
        files = {"stdout": str(stdout), "stderr": str(stderr)}
        job: dict[str, Any] = {
            "program": program,
            "arguments": arguments,
            "env": env or {},
            **files,
        }
        job["quick_end"] = quick_end
        assert zygote.stdin is not None and zygote.stdout is not None
        zygote.stdin.write(json.dumps(job).encode() + b"\n")
        zygote.stdin.flush()
        return int(zygote.stdout.readline())

    def wait(self, preload: str = "torch") -> int:
        """Wait for the program that was started; return its exit code, negative for a signal."""
        zygote = self._started[preload]
        assert zygote.stdout is not None
        return int(zygote.stdout.readline())

    def _start(self, preload: str) -> subprocess.Popen[bytes]:
        if importlib.util.find_spec(preload) is None:
            import pytest  # tests/torch_utils/gpu needs this module, but not pytest.

            pytest.skip(f"{preload} is not installed")
        self._started[preload] = subprocess.Popen(
            [sys.executable, str(SUPPORT / "zygote.py"), preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": IMPORT_PATH},
        )
        return self._started[preload]


ZYGOTES = Zygotes()
"""Of this test process; the root `conftest.py` closes them."""
