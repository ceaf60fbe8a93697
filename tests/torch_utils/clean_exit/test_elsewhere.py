"""Systems that lack what the checker builds on: it sees less there, and keeps its times."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from torch_utils.clean_exit import check, processes

# Starts the keeper as its command line says, on a system that has none of these.
WITHOUT = """#!/bin/sh
exec {python} -I -S -c '
import builtins, os, signal, sys
for module, name in {missing}:
    if hasattr(module, name): delattr(module, name)
if {no_ctypes}: sys.modules["ctypes"] = None
def refuse(usual):
    def opens(path, *more, **options):
        if {no_proc} and str(path).startswith(("/proc", "/dev/fd")): raise FileNotFoundError(path)
        return usual(path, *more, **options)
    return opens
builtins.open, os.listdir, os.open = refuse(open), refuse(os.listdir), refuse(os.open)
script = sys.argv[1]
exec(compile(open(script).read(), script, "exec"), dict(__file__=script, __name__="__main__"))
' "$3"
"""
SYSTEMS = {
    "no pidfd": ('[(os, "pidfd_open"), (signal, "pidfd_send_signal")]', False, False),
    "no prctl": ("[]", True, False),
    "no /proc": ("[]", False, True),
    "none of them": (
        '[(os, "pidfd_open"), (signal, "pidfd_send_signal"), (os, "waitid")]',
        True,
        True,
    ),
}


QUICK = ("no /proc", "none of them")


@pytest.fixture(
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS
    ]
)
def system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    missing, no_ctypes, no_proc = SYSTEMS[request.param]
    python = tmp_path / "python"
    options = {"missing": missing, "no_ctypes": no_ctypes, "no_proc": no_proc}
    python.write_text(WITHOUT.format(python=sys.executable, **options))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    if "pidfd" in missing:
        monkeypatch.delattr(os, "pidfd_open")
    if no_proc:
        monkeypatch.setattr(processes, "_PROC", tmp_path / "nowhere")
    name: str = request.param
    return name


def test_timeouts_are_kept(system: str) -> None:
    """By a plain kill, of the program at least, also where it will not listen."""
    deaf = "trap '' TERM; echo deaf; while :; do sleep 0.1; done"
    for command, number in (
        (["sleep", "300"], signal.SIGTERM),
        (["sh", "-c", deaf], signal.SIGKILL),
    ):
        report = check(command, timeout_s=1)
        assert (report.timed_out, report.returncode) == (True, -number), report


def test_ends_are_told(system: str) -> None:
    """Exit codes, signals, and what is on stderr."""
    assert check(["sh", "-c", "exit 3"]).returncode == 3
    assert check(["sh", "-c", "kill -9 $$"]).returncode == -9
    quotes = "Exception ignored in: <f>\nTraceback (most recent call last):\nValueError: x\n"
    report = check(["sh", "-c", f"printf '%s' '{quotes}' >&2"])
    assert [finding.id for finding in report.findings] == ["unraisable"]
    assert report.exit_code == 120


def test_left_over_processes(system: str) -> None:
    """They are found wherever /proc and prctl are."""
    report = check(["sh", "-c", "setsid sleep 3 >/dev/null 2>&1 & exit 0"])
    found = [finding.id for finding in report.findings]
    assert found == (["left-over-process"] if system == "no pidfd" else []), report
