"""The record of the probes: child processes, many errors, and files of the program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clean_exit import check

MANY = """
class A:
    def __del__(self): raise ValueError("the driver is gone")
for number in range(2000): A()
"""
INHERITED = """
import os, sys, types
distributed = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: is_on
distributed.get_backend = lambda: "gloo"
sys.modules["torch.distributed"] = distributed
is_on = {before}
if os.fork() == 0:
    is_on = True
    sys.exit()
os.wait()
is_on = False
"""
CHILD = """
import os
class A:
    def __del__(self): raise ValueError("dirty")
print(os.getpid(), flush=True)
A()
"""
FORK = f"import os\nif os.fork():\n    os.wait()\nelse:\n    exec({CHILD!r})"
SUBPROCESS = "import subprocess, sys; subprocess.run(sys.argv[1:])"
COMMAND = [sys.executable, "-c", CHILD]


@pytest.mark.parametrize(
    ("parent", "expected"),
    [(SUBPROCESS, " ".join(" ".join(COMMAND).split())), (FORK, "a forked process")],
    ids=["subprocess", "fork"],
)
def test_error_in_a_child_has_its_id_and_command_line(parent: str, expected: str) -> None:
    report = check(["-c", parent, *COMMAND])
    (finding,) = report.findings
    assert (finding.id, finding.pid) == ("unraisable", int(report.stdout)), report
    assert finding.summary.startswith("ValueError: dirty in ")
    assert expected in " ".join(finding.process.split())
    assert f"in process {finding.pid}: {finding.process}" in str(finding)


CRASHES = """
import subprocess, sys
code = "import os; os.kill(os.getpid(), %s)" % sys.argv[1]
print(subprocess.run([sys.executable, "-c", code]).returncode)
"""


def test_crashed_python_child_is_reported_with_its_stack() -> None:
    """A child that its parent terminates is not."""
    for number, found in (("11", ["crash"]), ("15", [])):
        report = check(["-c", CRASHES, number])
        assert report.returncode == 0
        assert report.stdout == f"-{number}\n"
        assert [finding.id for finding in report.findings] == found, report
        for finding in report.findings:
            assert finding.summary == "a process that it started crashed: Segmentation fault"
            assert (finding.pid is not None, finding.process != "") == (True, True)
            assert "most recent call first" in finding.evidence


def test_equal_errors_are_counted() -> None:
    report = check(["-c", MANY])
    assert {finding.id for finding in report.findings} == {"unraisable"}
    assert len(report.findings) == 20
    other = "\nclass B:\n    def __del__(self): raise KeyError\nB()"
    report = check(["-c", MANY + other], ignore=["the driver is gone"])
    assert [finding.summary for finding in report.findings] == ["KeyError in B.__del__()"]


def test_long_command_line_keeps_the_record() -> None:
    code = "import atexit, sys; sys.unraisablehook = print; atexit.register(lambda: 1 / 0)"
    report = check(["-c", code, *["argument"] * 10_000])
    assert report.probed
    assert [finding.id for finding in report.findings] == ["atexit-error"]


CRASH_WITH_MANY_FILES = """
import ctypes, os, sys
os.closerange(3, 10_000)
files = [os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY) for _ in range(400)]
if os.fork():
    os.wait()
else:
    os.abort()
"""


def test_crash_after_files_were_closed_writes_into_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    report = check(["-c", CRASH_WITH_MANY_FILES, str(path)])
    assert [finding.id for finding in report.findings] == ["crash"]
    assert path.read_bytes() == b""


def test_forked_child_is_not_blamed_for_its_parents_process_group() -> None:
    assert check(["-c", INHERITED.format(before=True)]).clean
    report = check(["-c", INHERITED.format(before=False)])
    assert [finding.id for finding in report.findings] == ["process-group-not-destroyed"]


def test_program_from_a_pipe_is_run_and_checked() -> None:
    dirty = "class A:\n    def __del__(self): 1 / 0\na = A()\nprint('ran')"
    command = ["bash", "-c", f'exec {sys.executable} <(cat <<"END"\n{dirty}\nEND\n)']
    report = check(command, timeout_s=600)
    assert report.stdout == "ran\n", str(report)
    assert [finding.id for finding in report.findings] == ["unraisable"], str(report)
