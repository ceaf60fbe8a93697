"""The record of the probes: the phases of the program's end, and errors seen from inside.

The program can write to the file. So nothing in it is trusted, and invalid entries are skipped.
"""

from __future__ import annotations

import ast
import math
import os
import re
import stat
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clean_exit.findings import PHASES, Finding

_MAX_BYTES = 32 << 20
_MAX_LINE = 64 * 1024
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.*)$", re.MULTILINE)
_SLOW = re.compile(r"^Timeout \([\d:.]+\)!\n(?P<stacks>.*?)(?=^Fatal|\Z)", re.MULTILINE | re.DOTALL)
# The object at the end of "Exception ignored ...", where Python 3.14 shows it.
_SHOWN = re.compile(
    r" <(?:(?:function|built-in function|bound method|class|generator object|coroutine object"
    r"|async_generator object) '?(?P<name>[\w.<>]+)(?: at 0x| of |'?>)|(?P<type>[\w.]+) object)"
)
# The errors that an entry of another shape, or with huge numbers, can cause.
_INVALID = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)


class _Entry(NamedTuple):
    """One line of the record."""

    kind: str
    pid: int
    time_s: float
    phase: str
    test: str
    fields: tuple[Any, ...]


@dataclass
class Record:
    """The observations from inside. Times are in seconds on the monotonic clock.

    Attributes:
        program_pid: The program.
        max_shutdown_s: The limit of a shutdown, in seconds.
        commands: The command lines of the processes with a probe, by id.
        tests: The test that each process runs, or that has started it, by id.
        pid: The process that the times are about: the program, or the first Python below it;
            None if no probe was loaded.
        phase: Its last phase; "" if no probe was loaded.
        atexit_s: The time when its threads were joined and its atexit callbacks began; None if a
            signal or os._exit ended it before.
        atexit_delay_ns: How long it had to wait for a processor until then, in nanoseconds.
        findings: The findings of all processes.
        errors: The number of errors of each type, to recognise their messages on stderr.
        shared_memory: The shared memory blocks that were created and not removed: the name, and
            the test that ran.
        semaphores: The same for named semaphores.
        sessions: By process, the number of test sessions that have begun and not ended. Those of
            child processes of a Python program do not count.
        ran: The tests that have begun.
        failed: What has failed in these sessions and was not repeated: tests, files or classes.
        slow_stacks: The stacks of the program when its shutdown became slow.
        crash_stacks: The stacks that faulthandler wrote when the program crashed.
    """

    program_pid: int = 0
    max_shutdown_s: float = math.inf
    commands: dict[int, str] = field(default_factory=dict)
    tests: dict[int, str] = field(default_factory=dict)
    pid: int | None = None
    phase: str = ""
    atexit_s: float | None = None
    atexit_delay_ns: int = 0
    findings: list[Finding] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    shared_memory: dict[str, str] = field(default_factory=dict)
    semaphores: dict[str, str] = field(default_factory=dict)
    sessions: Counter[int] = field(default_factory=Counter)
    ran: set[str] = field(default_factory=set)
    failed: dict[str, None] = field(default_factory=dict)
    slow_stacks: str = ""
    crash_stacks: str = ""
    _parents: dict[int, int] = field(default_factory=dict)
    _atexit: dict[int, _Entry] = field(default_factory=dict)
    _teardown: dict[int, _Entry] = field(default_factory=dict)

    def add(self, entry: _Entry) -> None:
        """Add an entry of a probe."""
        kind, fields = entry.kind, entry.fields
        is_program = entry.pid == self.pid
        if kind == "start":
            self.commands[entry.pid] = str(fields[0])
            self._parents[entry.pid] = int(fields[1])
            # The process may become another Python program by exec.
            self.sessions.pop(entry.pid, None)
            self.atexit_s = None if is_program else self.atexit_s
        if kind in ("start", "forked"):
            self.tests[entry.pid] = entry.test
        elif kind == "test":
            self.tests[entry.pid] = name = str(fields[0])
            self.ran.add(name)
            for one in [one for one in self.failed if _repeats(name, one)]:
                del self.failed[one]
        elif kind in ("unraisable", "thread"):
            self.findings.append(self._error(entry))
            self.errors[fields[-3].rpartition(".")[2]] += 1
        elif kind == "logging":
            logger, name, message, places = fields
            error = f"{name}: {message}" if message else name
            summary = f"{_first_line(error)}; a message of the logger {logger!r} was lost"
            evidence = _format_places(places) + error
            self.findings.append(self._finding("logging-error", summary, evidence, entry))
        elif kind == "logged":
            message, error = map(str, fields)
            summary, evidence = _first_line(message), f"{message}\n{error}".strip()
            self.findings.append(self._finding("unraisable", summary, evidence, entry))
            self.errors[summary] += 1
        elif kind == "session" and self._counts(entry.pid):
            self.sessions[entry.pid] += int(fields[0])
        elif kind == "failed" and self._counts(entry.pid):
            self.failed[str(fields[0])] = None
        elif kind == "process-group":
            summary = f"its backend is {fields[0]}; call torch.distributed.destroy_process_group()"
            self.findings.append(self._finding("process-group-not-destroyed", summary, "", entry))
        elif kind == "leaked":
            what, count, message = fields
            is_semaphore = what.startswith("sem")
            found_id = "leaked-semaphore" if is_semaphore else "leaked-shared-memory"
            test = join_tests((self.semaphores if is_semaphore else self.shared_memory).values())
            summary = f"{int(count)} {what} objects"
            self.findings.append(Finding(found_id, summary, str(message), test=test))
        elif kind.startswith(("shared-memory", "semaphore")):
            objects = self.semaphores if kind.startswith("sem") else self.shared_memory
            if kind.endswith("-removed"):
                objects.pop(str(fields[0]), None)
            else:
                objects[str(fields[0])] = entry.test
        elif kind in ("atexit", "teardown"):
            (self._atexit if kind == "atexit" else self._teardown)[entry.pid] = entry
        if is_program and kind == "atexit":
            self.atexit_s, self.atexit_delay_ns = entry.time_s, int(fields[0])
        if is_program and kind in ("start", "main-ended", "atexit", "teardown"):
            self.phase = entry.phase

    def _counts(self, pid: int) -> bool:
        """Whether the sessions of a process are the program's: its own, or below a shell, all."""
        if self.pid == self.program_pid:
            return pid == self.pid
        return self._parents.get(pid, pid) not in self.commands

    def _was_slow(self, pid: int) -> bool:
        """Whether a process whose timer has run out was slow, not only kept from running."""
        began, ended = self._atexit.get(pid), self._teardown.get(pid)
        if began is None or ended is None or ended.time_s - began.time_s < self.max_shutdown_s:
            return True  # Its end is not known, or it came later.
        delay_s = (int(ended.fields[0]) - int(began.fields[0])) / 1e9
        return ended.time_s - began.time_s - delay_s > self.max_shutdown_s

    def finish(self, folder: Path) -> None:
        """Add what is known only at the end: crashes and slow shutdowns."""
        for path in folder.glob("stacks-*"):
            pid = path.name.rpartition("-")[2]
            if not pid.isdecimal():
                continue
            entry = _Entry("", int(pid), 0.0, "", "", ())
            text = read_stacks(str(folder), entry.pid)
            slow, fatal = _SLOW.search(text), _FATAL.search(text)
            slow_stacks = slow["stacks"].strip() if slow else ""
            crash_stacks = text[fatal.start() :].strip() if fatal else ""
            if entry.pid == self.program_pid:
                self.slow_stacks, self.crash_stacks = slow_stacks, crash_stacks
                continue
            if slow and self._was_slow(entry.pid):
                summary = "a process that it started took longer than the limit"
                self.findings.append(self._finding("slow-shutdown", summary, slow_stacks, entry))
            if fatal:
                summary = f"a process that it started crashed: {fatal['what']}"
                self.findings.append(self._finding("crash", summary, crash_stacks, entry))

    def _finding(self, found: str, summary: str, evidence: str, entry: _Entry) -> Finding:
        is_program = entry.pid == self.program_pid
        process = "" if is_program else self.commands.get(entry.pid, "a forked process")
        phase = entry.phase if entry.phase in PHASES else ""
        # Below a wrapper such as a shell, the first Python is the program that people mean.
        is_child = not is_program and entry.pid != self.pid
        test = entry.test or self.tests.get(entry.pid, "")
        return Finding(found, summary, evidence, phase, entry.pid, process, is_child, test)

    def _error(self, entry: _Entry) -> Finding:
        *context, name, message, places = entry.fields
        error = f"{name}: {message}" if message else name
        if entry.kind == "thread":
            found, where = "thread-error", f"thread {context[0]!r}"
        else:
            event, what = context
            where = _object_name(what) or _shown_name(event)
            in_finalizer = any(Path(place[0]).name == "weakref.py" for place in places)
            found = "unraisable"
            if "atexit callback" in event:
                found = "atexit-error"
            elif "thread started by" in event:
                found = "thread-error"
            elif name == "ResourceWarning" or message.endswith(" was never awaited"):
                found = "resource-warning"
            elif in_finalizer or what.startswith("weakref."):
                found = "finalizer-error"
        first = _first_line(error)
        summary = f"{first} in {where}" if where else first
        return self._finding(found, summary, _format_places(places) + error, entry)


def _repeats(test: str, failed: str) -> bool:
    """Whether a test is what failed before, or is in the file or the class that failed."""
    first, _, inner = failed.partition(" (")  # "setUpClass (m.Case)", or "m.Case.test (n=2)"
    is_inside = bool(inner) and test.startswith(f"{inner.removesuffix(')')}.")
    return test in (failed, first) or test.startswith(f"{failed}::") or is_inside


def join_tests(tests: Iterable[str]) -> str:
    """Return the tests that several things are about, in one line."""
    return ", ".join(dict.fromkeys(filter(None, tests)))


def read_record(folder: str, program_pid: int, max_shutdown_s: float) -> Record:
    """Read the record of a run, which may still go on."""
    record = Record(program_pid, max_shutdown_s)
    lines = read_file(Path(folder, "events")).split(b"\n")
    entries = [entry for line in lines if (entry := _parse(line)) is not None]
    starts = [entry.pid for entry in entries if entry.kind == "start"]
    if not starts:
        return record
    # A wrapper such as a shell may start several Pythons.
    record.pid = program_pid if program_pid in starts else starts[0]
    for entry in entries:
        try:
            record.add(entry)
        except _INVALID:
            continue
    record.finish(Path(folder))
    return record


def read_file(path: Path) -> bytes:
    """Return the first 32 MB of a regular file; empty if the program put something else there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        with open(file, "rb", closefd=False) as stream:
            return stream.read(_MAX_BYTES)
    finally:
        os.close(file)


def read_stacks(folder: str, pid: int) -> str:
    """Return the stacks that a process has written so far."""
    return read_file(Path(folder, f"stacks-{pid}")).decode("utf-8", "replace")


def _parse(line: bytes) -> _Entry | None:
    if not line.startswith(b"('") or len(line) > _MAX_LINE:
        return None
    try:
        kind, pid, time_s, phase, test, *fields = ast.literal_eval(line.decode("utf-8", "replace"))
        entry = _Entry(str(kind), int(pid), float(time_s), phase, str(test), tuple(fields))
        is_valid = phase in PHASES and 0 < entry.pid < 1 << 32 and math.isfinite(entry.time_s)
    except (*_INVALID, SyntaxError, SystemError, MemoryError, RecursionError):
        return None  # The process was killed while it wrote, or the program wrote this line.
    return entry if is_valid else None


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def _shown_name(event: str) -> str:
    """Return the usual name of the object in a message; without an object, what Python did."""
    if match := _SHOWN.search(event):
        return f"{match['name']}()" if match["name"] else f"a {match['type']}"
    # Such as "flushing sys.stdout".
    return re.split("Exception ignored (?:on|while) |Exception ignored in", event)[-1].strip(" :")


def _object_name(what: str) -> str:
    """Return the usual name of an object: a function by its name, anything else by its type."""
    kind, _, name = what.partition(" ")
    return f"{name}()" if name else kind and f"a {kind.removeprefix('builtins.')}"


def _format_places(places: list[tuple[str, int, str]]) -> str:
    """Format a traceback as Python does, with the source lines that can be read."""
    # Only a file is read: the name may be that of a FIFO, or too long.
    is_file = {path: os.path.isfile(path) for path, _, _ in places}  # noqa: PTH113
    frames = [(*place, None if is_file[place[0]] else "") for place in places]
    head = ["Traceback (most recent call last):\n"] if places else []
    return "".join([*head, *traceback.format_list(frames)])
