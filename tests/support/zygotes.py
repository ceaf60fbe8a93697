"""Fork programs from an interpreter that has imported torch, which takes seconds, only once."""

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
# A test file that is run as a program imports its neighbours.
IMPORT_PATH = str(SUPPORT.parents[1])


class Zygotes:
    """The interpreter, started when it is first needed.

    Not for several threads. What it has started ends with `close`, or with this process.
    """

    def __init__(self) -> None:
        self._started: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        if self._started is not None:
            self._started.communicate()
            self._started = None

    def run(self, program: str, *arguments: str, timeout_s: float, **options: Any) -> int:
        """Run Python source in a child; kill it after some seconds. See `start`."""
        pid = self.start(program, *arguments, **options)
        output: Any = self._zygote().stdout
        if not select.select([output], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
        return self.wait()

    def start(
        self,
        program: str,
        *arguments: str,
        stdout: Path,
        stderr: Path,
        env: dict[str, str] | None = None,
        quick_end: bool = False,
    ) -> int:
        """Start a program and return its process id; `wait` must be called before the next.

        Args:
            stdout, stderr: Files that are there already.
            env: What is changed in its environment, once it has been forked.
            quick_end: Put its heap aside after the last of its exit callbacks. Walking all of
                torch some five times is the most that the end of such a program costs.
        """
        job: dict[str, Any] = {"program": program, "arguments": arguments, "env": env or {}}
        job |= {"stdout": str(stdout), "stderr": str(stderr), "quick_end": quick_end}
        stdin: Any = self._zygote().stdin
        stdin.write(json.dumps(job).encode() + b"\n")
        return self.wait()

    def wait(self) -> int:
        """Wait for the program that was started; return its exit code, negative for a signal."""
        output: Any = self._zygote().stdout
        return int(output.readline())

    def _zygote(self) -> subprocess.Popen[bytes]:
        if self._started is None:
            if importlib.util.find_spec("torch") is None:
                import pytest  # Programs that import this module do not need it.

                pytest.skip("torch is not installed")
            self._started = subprocess.Popen(
                [sys.executable, str(SUPPORT / "zygote.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": IMPORT_PATH},
            )
        return self._started


ZYGOTES = Zygotes()
"""Of this test process; the root `conftest.py` closes them."""
