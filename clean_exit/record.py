"""What the probes recorded: the phases of the program's end, and errors seen from inside.

The file is the program's to write to. So nothing in it is taken on trust, and what makes no sense
is passed over.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clean_exit.findings import PHASES, Finding

_MOST_BYTES = 16 << 20
_LONGEST_LINE = 64 * 1024
_MOST_TRIES = 100
_IN_FULL = 3  # as in the probe: errors alike that come one by one
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.*)$", re.MULTILINE)
# Any error that an entry of another shape, or with huge numbers, may cause.
_NOT_AS_WRITTEN = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)


@dataclass
class Record:
    """What was seen from inside of the program.

    Attributes:
        pid: The process whose phases these are: the program, or the first Python below it; None
            where no probe was loaded.
        ticks: When that process was started, in clock ticks since boot.
        main_ended_s: When its main module ended, on the monotonic clock; None if it did not, or
            not in order (a signal, os._exit).
        atexit_s: When its threads had been joined and its atexit callbacks began.
        teardown_s: When atexit had run and the interpreter began to be taken apart.
        findings: What was recorded of all processes.
        errors: How many errors were recorded of each type, to recognise them on stderr.
        shared_memory: Names of the blocks that were made and not removed.
        stacks: Stacks of the threads of that process, as the checker asked for them.
    """

    pid: int | None = None
    ticks: int | None = None
    main_ended_s: float | None = None
    atexit_s: float | None = None
    teardown_s: float | None = None
    findings: list[Finding] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    shared_memory: set[str] = field(default_factory=set)
    stacks: str = ""

    @property
    def phase(self) -> str:
        """The phase that the process has come to; empty where no probe was loaded."""
        if self.pid is None:
            return ""
        if self.teardown_s is not None:
            return "teardown"
        if self.atexit_s is not None:
            return "atexit"
        return "threads" if self.main_ended_s is not None else "main"


class _Entry(NamedTuple):
    """One line of the record."""

    kind: str
    pid: int
    time_s: float
    phase: str
    fields: tuple[Any, ...]


def read_record(folder: str | None, program_pid: int) -> Record:
    """Read what probes have recorded so far."""
    record = Record()
    if folder is None:
        return record
    lines = _read(Path(folder, "events")).split(b"\n")
    entries = [entry for line in lines if (entry := _parse(line)) is not None]
    starts = [entry.pid for entry in entries if entry.kind == "start"]
    if not starts:
        return record
    # A wrapper (a shell, say) may start several; the program itself comes first.
    record.pid = program_pid if program_pid in starts else starts[0]
    record.stacks = _read(Path(folder, f"stacks-{record.pid}")).decode("utf-8", "replace")
    reader = _Reader(record, program_pid)
    for entry in entries:
        try:
            reader.take(entry)
        except _NOT_AS_WRITTEN:
            continue
    reader.finish(Path(folder))
    return record


def _read(path: Path) -> bytes:
    """Read a plain file that the program may have replaced by anything."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        with open(file, "rb", closefd=False) as stream:
            data = stream.read(_MOST_BYTES)
            size = stream.seek(0, os.SEEK_END)
            if size > _MOST_BYTES:  # The beginning, and the end.
                stream.seek(max(_MOST_BYTES, size - _MOST_BYTES))
                data += stream.read(_MOST_BYTES)
            return data
    finally:
        os.close(file)


def _literal(text: str) -> Any:
    for _ in range(_MOST_TRIES):
        try:
            return ast.literal_eval(text)
        except SystemError:
            pass  # CPython 3.11, while another thread parses too (gh-106905): no fault of the text.
    raise ValueError("cannot be parsed")


def _parse(line: bytes) -> _Entry | None:
    if not line.startswith(b"('") or len(line) > _LONGEST_LINE:
        return None
    try:
        kind, pid, time_s, phase, *fields = _literal(line.decode("utf-8", "replace"))
        entry = _Entry(str(kind), int(pid), float(time_s), phase, tuple(fields))
        is_valid = phase in PHASES and 0 < entry.pid < 1 << 32 and math.isfinite(entry.time_s)
    except (*_NOT_AS_WRITTEN, SyntaxError, MemoryError, RecursionError):
        return None  # The program was killed in the middle of a line, or wrote this one itself.
    return entry if is_valid else None


class _Reader:
    """Takes the record entry by entry."""

    def __init__(self, record: Record, program_pid: int) -> None:
        self._record = record
        self._program_pid = program_pid
        self._commands: dict[int, str] = {}
        self._groups: dict[int, Finding] = {}
        self._again: dict[tuple[Any, ...], tuple[int, _Entry]] = {}

    def take(self, entry: _Entry) -> None:
        """Take the next entry."""
        record, kind, fields = self._record, entry.kind, entry.fields
        is_program = entry.pid == record.pid
        if kind == "start":
            command, ticks = fields
            self._commands[entry.pid] = str(command)[:300]
            if is_program:  # Once more, if it has become another Python program.
                record.ticks = ticks
                record.main_ended_s = record.atexit_s = record.teardown_s = None
        elif kind in ("unraisable", "thread"):
            *said, name, message, places = fields
            finding = self._error(entry, kind, entry.phase, said, name, message, places)
            record.findings.append(finding)
            record.errors[name.rpartition(".")[2]] += 1
        elif kind == "again":
            count, *key = fields
            error = (entry.pid, *map(str, key))
            self._again[error] = int(count), entry
        elif kind in ("process-group", "process-group-at-main-end"):
            summary = f"its backend is {fields[0]}; call torch.distributed.destroy_process_group()"
            # A forked child may leave after its main function, by os._exit; or go on to the end.
            self._groups[entry.pid] = self._finding(
                "process-group-not-destroyed", summary, "", entry
            )
            if kind == "process-group":
                record.findings.append(self._groups.pop(entry.pid))
        elif kind == "leaked":
            what, count, message = fields
            found = "leaked-semaphore" if what.startswith("sem") else "leaked-shared-memory"
            record.findings.append(Finding(found, f"{int(count)} {what} objects", str(message)))
        elif kind == "shared-memory":
            record.shared_memory.add(str(fields[0]))
        elif kind == "shared-memory-removed":
            record.shared_memory.discard(str(fields[0]))
        elif is_program and kind == "main-ended":
            record.main_ended_s = entry.time_s
        elif is_program and kind == "atexit":
            record.atexit_s = entry.time_s
        elif kind == "teardown":
            self._groups.pop(entry.pid, None)
            if is_program:
                record.teardown_s = entry.time_s

    def finish(self, folder: Path) -> None:
        """Take what is only known at the end: counts, groups of processes, crashes."""
        record = self._record
        record.findings += self._groups.values()
        for count, entry in self._again.values():
            try:
                _, kind, phase, said, name, message = entry.fields
                found = self._error(entry, kind, phase, said, name, message, [])
                more = max(0, min(count, 1 << 32) - _IN_FULL)
                record.errors[name.rpartition(".")[2]] += more
            except _NOT_AS_WRITTEN:
                continue
            summary = f"at least {more} more: {found.summary}"
            record.findings.append(self._finding(found.id, summary, "", entry))
        for path in folder.glob("stacks-*"):
            match = _FATAL.search(text := _read(path).decode("utf-8", "replace"))
            pid = path.name.rpartition("-")[2]
            if match and pid.isdecimal() and int(pid) != self._program_pid:
                entry = _Entry("crash", int(pid), 0.0, "", ())
                summary = f"a process that it started crashed: {match['what']}"
                record.findings.append(
                    self._finding("crash", summary, text[match.start() :], entry)
                )

    def _finding(self, found: str, summary: str, evidence: str, entry: _Entry) -> Finding:
        is_program = entry.pid == self._program_pid
        process = "" if is_program else self._commands.get(entry.pid, "a forked process")
        phase = entry.phase if entry.phase in PHASES else ""
        return Finding(found, summary, evidence, phase, entry.pid, process)

    def _error(
        self,
        entry: _Entry,
        kind: str,
        phase: str,
        said: list[str] | tuple[str, ...],
        name: str,
        message: str,
        places: list[tuple[str, int, str]],
    ) -> Finding:
        shown = f"{name}: {message}" if message else name
        first = (shown.splitlines() or [""])[0]
        of_finalizer = any(Path(place[0]).name == "weakref.py" for place in places)
        where = ""
        if kind == "thread":
            found, where = "thread-error", f"thread {said[0]!r}" if said else ""
        else:
            context, what = said or ("", "")
            where = _place(what)
            found = (
                "finalizer-error" if of_finalizer or what.startswith("weakref.") else "unraisable"
            )
            if "atexit callback" in context:
                found = "atexit-error"
                where = where or context.partition("atexit callback")[2].strip(" :")
            elif "thread started by" in context:
                found = "thread-error"
        summary = f"{first} in {where}" if where else first
        return self._finding(
            found, summary, _format_places(places) + shown, entry._replace(phase=phase)
        )


def _place(what: str) -> str:
    """Name an object as people do: a function by its name, anything else by its type."""
    kind, _, name = what.partition(" ")
    return f"{name}()" if name else kind and f"a {kind.removeprefix('builtins.')}"


def _format_places(places: list[tuple[str, int, str]]) -> str:
    """Write a traceback as Python does, with the source lines that are at hand."""
    lines = ["Traceback (most recent call last):\n"] if places else []
    for path, line, function in places:
        lines.append(f'  File "{path}", line {line}, in {function}\n')
        # What a program calls its code may be anything, a FIFO that nobody writes to included.
        source = linecache.getline(path, line).strip() if Path(path).is_file() else ""
        if source:
            lines.append(f"    {source}\n")
    return "".join(lines)


def crash_stacks(folder: str | None, pid: int | None) -> str:
    """Return what the probe's faulthandler wrote when a process crashed, or nothing."""
    text = _read(Path(folder, f"stacks-{pid}")).decode("utf-8", "replace") if folder else ""
    match = _FATAL.search(text)
    return text[match.start() :].strip() if match else ""
