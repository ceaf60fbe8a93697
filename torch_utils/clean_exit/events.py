"""What the probe recorded: the phases of the program's end, and errors seen from inside."""

from __future__ import annotations

import ast
import linecache
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .findings import Finding


@dataclass
class Inside:
    """What was seen from inside of the program.

    Attributes:
        pid: The process that the probe was loaded in; None where it was not.
        main_ended_s: When its main module ended, on the monotonic clock; None if it did not, or
            not in order (a signal, os._exit).
        atexit_s: When its threads had been joined and its atexit callbacks began.
        teardown_s: When atexit had run and the interpreter began to be taken apart.
        spawned: Whether it started other processes, which have no probe.
        findings: What was recorded of it and of its forks.
        errors: The type names of those, to recognise them on stderr.
        shared_memory: Names of the blocks that were made and not removed.
        stacks: Stacks of its threads, at a crash or when the checker asked.
    """

    pid: int | None = None
    main_ended_s: float | None = None
    atexit_s: float | None = None
    teardown_s: float | None = None
    spawned: bool = False
    findings: list[Finding] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    shared_memory: set[str] = field(default_factory=set)
    stacks: str = ""


def read_events(path: Path, program_pid: int) -> Inside:
    """Read what a probe has recorded so far."""
    entries = [entry for line in _lines(path) if (entry := _parse(line)) is not None]
    inside = Inside(stacks=_read(path.with_name(path.name + ".stacks")))
    starts = [entry for entry in entries if entry[0] == "start"]
    if not starts:
        return inside
    # A wrapper (a shell, say) may start several; the program itself comes first.
    start = next((entry for entry in starts if entry[1] == program_pid), starts[0])
    inside.pid = start[1]
    inside.spawned = len(starts) > 1
    for entry in entries:
        _note(inside, entry)
    return inside


def _read(path: Path) -> str:
    try:
        # Whatever the program has put there: a FIFO would keep this waiting, a link lead away.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as reader:
            data = reader.read() if stat.S_ISREG(os.fstat(file).st_mode) else b""
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


def _parse(line: str) -> tuple[Any, ...] | None:
    try:
        entry = ast.literal_eval(line)
    except (ValueError, SyntaxError):  # The program was killed in the middle of a line.
        return None
    return entry if isinstance(entry, tuple) and len(entry) >= 4 else None


def _note(inside: Inside, entry: tuple[Any, ...]) -> None:
    kind, pid, time_s, phase, *rest = entry
    if kind == "spawned":
        inside.spawned = True
    elif kind == "main-ended" and pid == inside.pid:
        inside.main_ended_s = time_s
    elif kind == "atexit" and pid == inside.pid:
        inside.atexit_s = time_s
    elif kind == "teardown" and pid == inside.pid:
        inside.teardown_s = time_s
    elif kind == "shared-memory":
        inside.shared_memory.add(rest[0])
    elif kind == "shared-memory-removed":
        inside.shared_memory.discard(rest[0])
    elif kind == "process-group":
        summary = f"its backend is {rest[0]}; call torch.distributed.destroy_process_group()"
        inside.findings.append(Finding("process-group-not-destroyed", summary, "", phase, pid))
    elif kind in ("unraisable", "thread", "excepthook"):
        inside.findings.append(_error(kind, pid, phase, rest))
        inside.errors.append(rest[-3])


def _error(kind: str, pid: int, phase: str, rest: list[Any]) -> Finding:
    *said, name, message, places = rest
    shown = f"{name}: {message}" if message else name
    evidence = _format_places(places) + shown
    first = shown.splitlines()[0]
    of_finalizer = any(Path(p[0]).name == "weakref.py" for p in places)
    if kind == "thread":
        return Finding("thread-error", f"{first} in thread {said[0]!r}", evidence, phase, pid)
    if kind == "excepthook":
        found = "finalizer-error" if of_finalizer else "unraisable"
        return Finding(found, first, evidence, phase, pid)
    context, what = said
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
        source = linecache.getline(path, line).strip()
        if source:
            lines.append(f"    {source}\n")
    return "".join(lines)
