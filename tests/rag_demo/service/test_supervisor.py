"""The supervisor of several workers, with workers that do nothing but what they are told."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra service")

from rag_demo.errors import RagDemoError
from rag_demo.service import workers
from rag_demo.service.listener import bind
from rag_demo.service.settings import Settings

WORKER = """
import os, signal, socket, sys, time
from pathlib import Path

notes = Path(os.environ["NOTES"])

def note(what):
    with notes.open("a") as file:
        file.write(f"{what} {os.getpid()}\\n")

line = socket.socket(fileno=0)
told = int.from_bytes(line.recv(8), "little")
while told:
    told -= len(line.recv(told))
def first(what):
    try:
        os.close(os.open(notes.with_name(what), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
"""
RELOADS = """
signal.signal(signal.SIGHUP, lambda *_: note("reload"))
line.sendall(b"serves\\n")
while not notes.with_name("both").exists():
    note("serves")
    time.sleep(0.01)
if first("asked"):
    note("asked")
    line.sendall(b"reloaded\\n")
while True:
    time.sleep(1)
"""
STOPS = """
note("serves")
note("stops")
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(1)
"""
CANNOT_START = """
note("starts")
time.sleep(0.3)
line.sendall(b"there are no weights\\n")
sys.exit(1)
"""
DIES_ONCE = """
if first("first"):
    line.sendall(b"serves\\n")
    notes.with_name("serving").touch()
    while not notes.with_name("again").exists():
        time.sleep(0.01)
elif first("ill"):
    while not notes.with_name("serving").exists():
        time.sleep(0.01)
    sys.exit(1)
else:
    note("again")
    notes.with_name("again").touch()
while True:
    time.sleep(1)
"""


def supervise(
    folder: Path, program: str, until: str, monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> list[list[str]]:
    """Run two workers until there are so many notes of a kind; returns all notes."""
    notes = folder / "notes"
    notes.touch()
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr(workers, "_PROGRAM", WORKER + program)
    settings = Settings(index=folder, port=0, workers=2)

    def read() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()]

    has_ended = threading.Event()

    def stop() -> None:
        while not has_ended.wait(0.02):
            if len({number for what, number in read() if what == "serves"}) == 2:
                (folder / "both").touch()
            if sum(what == until for what, _ in read()) >= count:
                has_ended.wait(0.3)  # For what should not come.
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watching = threading.Thread(target=stop)
    watching.start()
    try:
        assert workers.run_workers(settings, bind(settings), ("text", "INFO")) == signal.SIGTERM
    finally:
        has_ended.set()
        watching.join()
    return read()


def test_one_that_has_reloaded_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are: each opens the index once."""
    notes = supervise(tmp_path, RELOADS, "reload", monkeypatch)
    ((_, asked),) = [note for note in notes if note[0] == "asked"]
    ((_, reloaded),) = [note for note in notes if note[0] == "reload"]
    assert asked != reloaded


def test_one_that_was_stopped_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of SIGTERM when it is continued."""
    supervise(tmp_path, STOPS, "stops", monkeypatch)


def test_workers_that_cannot_start_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long their failing takes, and with what they said."""
    # A bound in seconds, of which there is none now, would be over.
    monkeypatch.setattr(workers, "_SOON_S", 0.01)
    with pytest.raises(RagDemoError, match="there are no weights"):
        supervise(tmp_path, CANNOT_START, "starts", monkeypatch, count=5)
    assert 1 <= (tmp_path / "notes").read_text().count("starts") <= 2


def test_one_that_cannot_start_beside_one_that_serves_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever serves goes on; a replacement that fails once is no reason to stop."""
    monkeypatch.setattr(workers, "_LONGEST_WAIT_S", 0.01)
    assert supervise(tmp_path, DIES_ONCE, "again", monkeypatch)
