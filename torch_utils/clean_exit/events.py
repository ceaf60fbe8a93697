"""What the probes recorded: the phases of the program's end, and errors seen from inside.

The file is the program's to write to, so nothing in it is taken on trust: what makes no sense is
passed over.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .findings import PHASES, Finding, signal_name
from .messages import leak_id

_MOST_BYTES = 16 << 20
_MOST_AT_ONCE = 1 << 20
_LONGEST_LINE = 64 * 1024
_MOST_TRIES = 100
_IN_FULL = 3  # as in the probe: errors alike that come one by one


@dataclass
class Inside:
    """What was seen from inside of the program.

    Attributes:
        pid: The process that the probe was loaded in, the program's own if that has one; None
            where no probe was loaded.
        main_ended_s: When its main module ended, on the monotonic clock; None if it did not, or
            not in order (a signal, os._exit).
        atexit_s: When its threads had been joined and its atexit callbacks began.
        teardown_s: When atexit had run and the interpreter began to be taken apart.
        offers_stacks: The start of the process, in clock ticks since boot, and the number of its
            file for stacks, if its handler for the signal that asks for them is in place.
        unfinished: Other Pythons whose record has no end: killed, replaced, or left by os._exit.
        is_alone: Whether this is proven of the program: its record goes to its end and misses
            nothing, it never had a child, nor another interpreter.
        modules: Of the modules that print messages, those it had at its end.
        findings: What was recorded of it, its forks, and the Python programs it started.
        errors: How many errors were recorded of each type, to recognise them on stderr.
        shared_memory: Names of the blocks that were made and not removed.
        stacks: Stacks of its threads, as the checker asked for them.
    """

    pid: int | None = None
    main_ended_s: float | None = None
    atexit_s: float | None = None
    teardown_s: float | None = None
    offers_stacks: tuple[int, int] | None = None
    unfinished: set[int] = field(default_factory=set)
    is_alone: bool = False
    modules: frozenset[str] = frozenset()
    findings: list[Finding] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    shared_memory: set[str] = field(default_factory=set)
    stacks: str = ""


@dataclass(frozen=True)
class _Entry:
    """One line of the record."""

    kind: str
    pid: int
    time_s: float
    phase: str
    fields: tuple[Any, ...]


def read_events(path: Path, program_pid: int) -> Inside:
    """Read what probes have recorded so far."""
    entries = [e for line in _read(path).split(b"\n") if (e := _parse(line)) is not None]
    inside = Inside(stacks=_read(path.with_name(path.name + ".stacks")).decode("utf-8", "replace"))
    starts = [entry.pid for entry in entries if entry.kind == "start"]
    if not starts:
        return inside
    # A wrapper (a shell, say) may start several; the program itself comes first.
    inside.pid = program_pid if program_pid in starts else starts[0]
    reader = _Reader(inside, program_pid)
    for entry in entries:
        try:
            reader.note(entry)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            continue  # Not as a probe writes it.
    reader.finish()
    inside.is_alone = reader.is_complete and {entry.pid for entry in entries} == {program_pid}
    return inside


def _read(path: Path) -> bytes:
    """Read a plain file that the program may have replaced by anything."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        parts, left = [], _MOST_BYTES
        while left and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(file)


def _literal(text: str) -> Any:
    for _ in range(_MOST_TRIES):
        try:
            return ast.literal_eval(text)
        except SystemError:
            pass  # CPython 3.11, while another thread parses too (gh-106905): no fault of the text.
    return ast.literal_eval(text)


def _parse(line: bytes) -> _Entry | None:
    if not line.startswith(b"('") or len(line) > _LONGEST_LINE:
        return None
    try:
        entry = _literal(line.decode("utf-8", "replace"))
        kind, pid, time_s, phase, *fields = entry
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None  # The program was killed in the middle of a line, or wrote this one itself.
    if not (
        isinstance(kind, str) and type(pid) is int and 0 < pid < 1 << 32 and phase in tuple(PHASES)
    ):
        return None
    if not (isinstance(time_s, (int, float)) and math.isfinite(time_s)):
        return None
    return _Entry(kind, pid, float(time_s), phase, tuple(fields))


class _Reader:
    """Takes the record entry by entry."""

    def __init__(self, inside: Inside, program_pid: int) -> None:
        self._inside = inside
        self._program_pid = program_pid
        self._groups: dict[int, Finding] = {}
        self._again: dict[tuple[Any, ...], tuple[int, _Entry]] = {}
        self._is_complete = False
        self._goes_on = False

    @property
    def is_complete(self) -> bool:
        """Whether the record is proven to be that of all that the process did."""
        return self._is_complete and not self._goes_on

    def note(self, entry: _Entry) -> None:
        """Take the next entry."""
        inside, kind, fields = self._inside, entry.kind, entry.fields
        if kind == "shared-memory":
            inside.shared_memory.add(str(fields[0]))
        elif kind == "shared-memory-removed":
            inside.shared_memory.discard(str(fields[0]))
        elif kind == "leaked":
            what, count, message = str(fields[0]), int(fields[1]), str(fields[2])
            summary = f"{count} {what} objects"
            inside.findings.append(Finding(leak_id(what), summary, message, pid=entry.pid))
        elif kind == "child-crashed":
            name = signal_name(int(fields[1]))
            summary = f"{name} ended process {int(fields[0])}, which it had started"
            inside.findings.append(Finding("crash", summary, "", entry.phase, entry.pid))
        elif kind in ("executed", "interpreter"):
            self._goes_on = True
        elif kind in ("process-group", "process-group-at-main-end"):
            summary = f"its backend is {fields[0]}; call torch.distributed.destroy_process_group()"
            found = Finding("process-group-not-destroyed", summary, "", entry.phase, entry.pid)
            if kind == "process-group":
                inside.findings.append(found)
            else:
                self._groups[entry.pid] = found
        elif kind in ("unraisable", "thread", "excepthook"):
            *said, name, message, places = fields
            inside.findings.append(_error(entry, kind, entry.phase, said, name, message, places))
            inside.errors[name.rpartition(".")[2]] += 1
        elif kind == "again":
            count, key = int(fields[0]), tuple(map(str, fields[1:]))
            self._again[(entry.pid, *key)] = count, entry
        else:
            self._note_phase(entry)

    def _note_phase(self, entry: _Entry) -> None:
        inside = self._inside
        if entry.kind == "start" and entry.pid != self._program_pid:
            inside.unfinished.add(entry.pid)
        elif entry.kind == "teardown":
            self._groups.pop(entry.pid, None)
            inside.unfinished.discard(entry.pid)
        if entry.pid != inside.pid:
            return
        if entry.kind == "main-ended":
            inside.main_ended_s = entry.time_s
        elif entry.kind == "atexit":
            inside.atexit_s = entry.time_s
        elif entry.kind == "stacks":
            ticks, number = entry.fields
            inside.offers_stacks = None if ticks is None else (int(ticks), int(number))
        elif entry.kind == "teardown":
            inside.teardown_s = entry.time_s
            known = entry.fields[0]
            inside.modules = frozenset(map(str, known["modules"]))
            had_children = known["children"] != 0 or known["spawned"] or known["sigchld_ignored"]
            self._is_complete = not (known["lost"] or known["unseen"] or had_children)

    def finish(self) -> None:
        """Take what is only known at the end: counts, and who left without a word."""
        self._inside.findings += self._groups.values()
        for count, entry in self._again.values():
            try:
                _, kind, phase, said, name, message = entry.fields
                found = _error(entry, kind, phase, said, name, message, [])
                more = min(count, 1 << 32) - _IN_FULL
                summary = f"at least {more} more: {found.summary}"
                self._inside.errors[name.rpartition(".")[2]] += more
            except (TypeError, ValueError, AttributeError):
                continue  # Not as a probe writes it.
            self._inside.findings.append(Finding(found.id, summary, "", phase, entry.pid))


def _error(
    entry: _Entry,
    kind: str,
    phase: str,
    said: list[str] | tuple[str, ...],
    name: str,
    message: str,
    places: list[tuple[str, int, str]],
) -> Finding:
    pid = entry.pid
    shown = f"{name}: {message}" if message else name
    evidence = _format_places(places) + shown
    first = (shown.splitlines() or [""])[0]
    of_finalizer = any(Path(p[0]).name == "weakref.py" for p in places)
    if kind == "thread":
        where = f" in thread {said[0]!r}" if said else ""
        return Finding("thread-error", first + where, evidence, phase, pid)
    if kind == "excepthook":
        found = "finalizer-error" if of_finalizer else "unraisable"
        return Finding(found, first, evidence, phase, pid)
    context, what = said or ("", "")
    where = _place(what)
    if "atexit callback" in context:
        found = "atexit-error"
        where = where or context.partition("atexit callback")[2].strip(" :")
    elif "thread started by" in context:
        found = "thread-error"
    elif of_finalizer or what.startswith("weakref."):
        found = "finalizer-error"
    else:
        found = "unraisable"
    return Finding(found, f"{first} in {where}" if where else first, evidence, phase, pid)


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


class Growth:
    """Watches a file for a word, reading each part of it once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail, self._seen = path, 0, b"", False

    def has(self, word: bytes) -> bool:
        """Say whether the word has come."""
        if self._seen:
            return True
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            data = self._tail + os.pread(file, _MOST_AT_ONCE, self._offset)
        except OSError:  # The program has put something else there.
            return False
        finally:
            os.close(file)
        self._offset += len(data) - len(self._tail)
        self._tail = data[-len(word) :]
        self._seen = word in data
        return self._seen
