"""The messages that Python, torch, native libraries and shells write about an end."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .findings import Finding

IGNORED = re.compile(
    r"^Exception ignored (?P<how>in|on|while|when|from)\b(?P<what>.*)$"
    r"|^Error in atexit\._run_exitfuncs:$"
)
IN_THREAD = re.compile(r"^Exception in thread (?P<what>.+):$")
TRACEBACK = "Traceback (most recent call last):"
ERROR = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Group|Abort)\w*"
    r"|[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$"
)
_BARE_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b")
GROUP_TRACEBACK = re.compile(r"^  \+ Exception Group Traceback \(most recent call last\):$")
ERROR_IN_GROUP = re.compile(r"^  \| ([A-Za-z_].*)$")
END_OF_GROUP = re.compile(r"^    \+-{20,}$")
_CHAINS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
ASYNCIO = re.compile(
    r"^(?:.*\W)?(?P<what>Task was destroyed but it is pending!"
    r"|(?:Task|Future|_GatheringFuture) exception was never retrieved"
    r"|unhandled exception during asyncio\.run\(\) shutdown"
    r"|an error occurred during closing of asynchronous generator <.*>)$"
)
TRACKER = re.compile(
    r"^\S.*resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be "
    r"(?P<count>\d+) leaked (?P<kind>\w+) objects? to clean up at shutdown(?P<names>.*)$"
)
PROCESS_GROUP = re.compile(
    r"^\[.*ProcessGroup\w*\.cpp:\d+\].*"
    r"(destroy_process_group\(\) was not called|has NOT been destroyed)"
)
CUDA_IPC = re.compile(
    r"^\[.*CudaIPCTypes\.cpp:\d+\](?: Warning:)? Producer process has been terminated"
)
RESOURCE_WARNING = re.compile(r"^\S.*:\d+: ResourceWarning: (?P<message>.*)$")
# What is printed by who aborts: Python, C++, the allocator, the compiler's guard, assert().
FATAL = re.compile(
    r"^(?:(?P<python>Fatal Python error: )"
    r"|terminate called (?:after throwing an instance of '.+'|without an active exception"
    r"|recursively)$"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): [a-z].*$|double free or corruption \(.*\)$"
    r"|corrupted size vs\. prev_size|\*\*\* stack smashing detected \*\*\*: "
    r"|\S+: .*: Assertion `.*' failed\.$)"
)
# "Segmentation fault", as dash says it; "x.sh: line 3: 12 Aborted   (core dumped) ./a", as bash.
SHELL = re.compile(
    r"^(?:(?:Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    r"(?: \(core dumped\))?|Aborted \(core dumped\)"
    r"|[^\s:][^:]*: (?:line )?\d+: +\d+ (?:Segmentation fault|Bus error|Illegal instruction"
    r"|Floating point exception|Aborted)\b.*)\s*$"
)
# A traceback without a word before it, told by its first frames from what a program prints.
_BARE_TRACEBACKS = (
    ("finalizer-error", 'weakref.py"', "in _exitfunc", ""),
    ("thread-error", 'multiprocessing/queues.py"', "in _feed", "multiprocessing.queues"),
)


@dataclass(frozen=True)
class Said:
    """One message: the finding, the type of the error in it, and a module that it comes from."""

    finding: Finding
    error: str = ""
    needs: str = ""


@dataclass
class Block:
    """A message of several lines, of which the first has come.

    Attributes:
        id, summary: Of the finding that it will be; no id for a traceback without a word before.
        lines: So far.
        needs: The module of Python's that prints it.
        in_traceback, in_group: Where in it the last line was.
        confirmed_by: What the next line has to look like.
        error: The line with the error, when it has come.
        is_chained: Whether another traceback has to follow.
        group_error: The same for the group of errors that it is about.
    """

    id: str
    summary: str
    lines: list[str] = field(default_factory=list)
    needs: str = ""
    in_traceback: bool = False
    in_group: bool = False
    confirmed_by: re.Pattern[str] | None = None
    error: str = ""
    is_chained: bool = False
    group_error: str = ""

    def confirm(self, line: str) -> bool:
        """Say whether a line may stand after the first one."""
        if self.confirmed_by is not None and self.confirmed_by.match(line):
            self.confirmed_by = None
            self.error = self.lines[0]
            return True
        return self.id == "crash" and not line

    def goes_on_with(self, line: str) -> bool:
        """Say whether what follows an error belongs to it, as what it is the cause of."""
        if line == TRACEBACK and self.is_chained:
            self.in_traceback, self.is_chained, self.error = True, False, ""
            return True
        if line:
            self.is_chained = line in _CHAINS
        return self.is_chained or not line

    def identify(self) -> bool:
        """Find out what a traceback without a word before it is; False for the program's own."""
        for name, file, function, needs in _BARE_TRACEBACKS:
            if any(file in line and line.endswith(function) for line in self.lines[1:2]):
                self.id, self.needs = name, needs
                return True
        return False


def is_bare_error(line: str) -> bool:
    """Whether it is an error as Python prints one that has no traceback."""
    return _BARE_ERROR.match(line) is not None


def kind_of(line: str) -> str:
    """Return the finding that a message with this first line is."""
    if "atexit" in line.partition("<")[0]:
        return "atexit-error"
    if "thread started by" in line.partition("<")[0]:
        return "thread-error"
    if "<finalize object" in line or "weakref callback" in line:
        return "finalizer-error"
    return "unraisable"


def summary_of(match: re.Match[str]) -> str:
    """Return what "Exception ignored" is about."""
    what = (match["what"] or "").strip(" :")
    for word in ("atexit callback", "thread started by"):
        what = what.removeprefix(word).strip(" :")
    return f"in {what}" if what else ""


def leak(match: re.Match[str], line: str) -> Finding:
    """Make a finding of the resource tracker's warning."""
    found = leak_id(match["kind"])
    names = match["names"].strip(" :")
    summary = f"{match['count']} {match['kind']} objects" + (f": {names}" if names else "")
    return Finding(found, summary, line)


def leak_id(kind: str) -> str:
    """Return the finding for what the resource tracker calls a kind of object."""
    return "leaked-semaphore" if kind.startswith("sem") else "leaked-shared-memory"
