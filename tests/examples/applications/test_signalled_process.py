"""A model in a process of its own, in a program that is stopped during a call."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import pytest

from tests.examples.applications.harness import PROGRAMS, Service, facts_of, started
from tests.support.programs import TIMEOUT_S, assert_clean
from tests.support.waiting import is_there, wait_for

LINES = "one\nthree\n"


def members(group: int) -> set[int]:
    """Return the running processes of a process group."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found.add(int(folder.name))
    return {pid for pid in found if is_there(pid)}


def open_pipe(path: Path, service: Service) -> TextIO:
    """Wait until the model reads from a named pipe, and open it for writing."""
    found: list[int] = []

    def is_read() -> bool:
        assert service.process.poll() is None, str(service.wait())
        with contextlib.suppress(OSError):  # ENXIO: nobody reads yet.
            found.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    wait_for(is_read)
    return open(found[0], "w")


def check(
    folder: Path, to: str = "program", number: int = signal.SIGTERM, mutant: str | None = None
) -> None:
    """The call in flight gets its answer, everything is closed, and no process remains.

    Args:
        to: Who gets the signal: the program alone, its process group, as from a terminal, or
            coreutils' ``timeout``, which sends it on to the program and the group.
    """
    file = folder / "lines"
    os.mkfifo(file)
    under = ["timeout", str(TIMEOUT_S)] if to == "timeout" else []
    program = str(PROGRAMS / "signalled_process.py")
    with started(*under, sys.executable, program, str(file), mutant=mutant) as service:
        group = service.process.pid
        try:
            with open_pipe(file, service) as lines:
                assert len(members(group)) == 2 + (to == "timeout")
                if to == "group":
                    os.killpg(group, number)
                else:
                    os.kill(group, number)
                service.wait_for_output("is_stopping")
                lines.write(LINES)
        except BrokenPipeError as error:
            raise AssertionError("the model's process ended during the call") from error
        done = service.wait()
        wait_for(lambda: not members(group))
    assert_clean(done, 128 + number)
    facts = facts_of(done.stdout)
    assert len(facts.get("answer", [])) == 2, str(done)
    assert facts["state"] == "closed"
    assert facts.get("closed") == 15
    assert facts["alive_mb"] == 0
    assert facts["grown_mb"] < 35
    assert facts["is_right"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["program", "group", "timeout"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_call_in_flight_ends_after_a_signal(tmp_path: Path, to: str, name: str) -> None:
    check(tmp_path, to, signal.Signals[name])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(tmp_path: Path, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(tmp_path, mutant=mutant)
