"""A program that quotes another's error on stderr is clean, if it can be proved to have been alone.

What a parser of the text can tell is in test_stderr_text.py; these need a look inside.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.clean_exit import check

MESSAGE = (
    "Exception ignored in: <function A.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    '  File "a.py", line 3, in __del__\nValueError: the driver is gone\n'
)
GROUP = """Exception in thread Thread-1 (work):
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 3, in work
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------
"""
FEEDER = """Traceback (most recent call last):
  File "/usr/lib/multiprocessing/queues.py", line 244, in _feed
    x
E: x
"""
SEMAPHORE = (
    "/a/resource_tracker.py:1: UserWarning: resource_tracker: There appear to be "
    "1 leaked semaphore objects to clean up at shutdown\n"
)
TEXTS = {
    "an unraisable error": MESSAGE,
    "a group of errors in a thread": GROUP,
    "an error of a queue's thread": FEEDER,
    "a task that is destroyed": "Task was destroyed but it is pending!\ntask: <Task pending>\n",
    "an error of a task": "Task exception was never retrieved\nfuture: <Task finished>\n",
    "a crash in a shell": "Segmentation fault\n",
    "an abort in a shell": "Aborted\n",
    "a fatal error": "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f:\n",
    "a C++ error": "terminate called without an active exception\n",
    "a leaked semaphore": SEMAPHORE,
}
BEFORE = {
    "files closed": "import os\nos.closerange(3, 1024)\n",
    "threads": "import threading\nt = threading.Thread(target=len, args=('',))\nt.start()\n",
    "asyncio": "import asyncio\n",
}


def quote(text: str) -> str:
    return f"import sys\nsys.stderr.write({text!r})\n"


CASES = {name: quote(text) for name, text in TEXTS.items()} | {
    f"an unraisable error, with {name}": f"{before}{quote(MESSAGE)}"
    for name, before in BEFORE.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_quotation_is_clean(name: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(CASES[name])
    report = check(path, stdin=subprocess.DEVNULL)
    assert report.clean, f"{report}\n{report.stderr}"
    assert report.exit_code == 0


def test_a_program_that_was_not_alone_is_not_trusted() -> None:
    """The control: the same words, where another program may have said them."""
    report = check(["-c", quote(MESSAGE) + "import os\nos.system('true')\n"])
    assert {finding.id for finding in report.findings} == {"unraisable"}
