"""Recognise the messages on stderr about a program's end; often nothing else shows a fault.

The parser knows messages of Python 3.10 to 3.14, asyncio, torch, the resource tracker, native
libraries and shells. It searches bytes, and decodes
only the chunks that may contain a message.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from clean_exit.findings import Finding

_MAX_LINE = 64 * 1024
_MAX_LINES = 200  # of one message
_LISTED = 20  # messages with the same type of error, as in the probe
_MAX_PREFIXES = 256

_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = re.compile(r"^Exception ignored (?:in|on|while|when|from)\b(?P<what>.*)$")
_AT_EXIT = re.compile(r"^Error in atexit\._run_exitfuncs:(?P<what>)$")
_IN_THREAD = re.compile(r"^Exception in thread (?P<what>.+):$")
_ERROR = re.compile(r"^(?:  \| )?(?P<name>[A-Za-z_][\w.]*)(?::? .*|$)")
_USUAL_NAME = re.compile(r"(Error|Exception|Exit|Interrupt|Warning|Iteration|Group|Abort)$")
_BETWEEN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ASYNCIO = re.compile(
    r"^(?:.*\W)?(?P<what>Task was destroyed but it is pending!"
    r"|(?:Task|Future|_GatheringFuture) exception was never retrieved"
    r"|unhandled exception during asyncio\.run\(\) shutdown"
    r"|an error occurred during closing of asynchronous generator <.*>)$"
)
_ASYNCIO_OBJECT = re.compile(r"^(task|future|asyncgen): <\w")
_TRACKER = re.compile(
    r"^\S.*resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be "
    r"(?P<count>\d+) leaked (?P<kind>\w+) objects? to clean up at shutdown(?P<names>.*)$"
)
_FATAL = re.compile(
    r"^(?:terminate called (?:after throwing an instance of '.+'|without an active exception"
    r"|recursively)$"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): [a-z].*$|double free or corruption \(.*\)$"
    r"|corrupted size vs\. prev_size|\*\*\* stack smashing detected \*\*\*: "
    r"|\S+: .*: Assertion `.*' failed\.$)"
)
_FATAL_PYTHON = "Fatal Python error: "
_AFTER_FATAL_PYTHON = re.compile(r"^(Python runtime state: |(Current t|T)hread 0x|<no Python f|$)")
# dash prints "Segmentation fault"; bash prints "x.sh: line 3: 12 Aborted   (core dumped) ./a".
_SHELL = re.compile(
    r"^(?:(?:Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    r"(?: \(core dumped\))?|Aborted \(core dumped\)"
    r"|[^\s:][^:]*: (?:line )?\d+: +\d+ (?:Segmentation fault|Bus error|Illegal instruction"
    r"|Floating point exception|Aborted)\b.*)\s*$"
)
_SINGLE_LINES = {
    "process-group-not-destroyed": re.compile(
        r"^\[.*ProcessGroup\w*\.cpp:\d+\].*"
        r"(destroy_process_group\(\) was not called|has NOT been destroyed)"
    ),
    "cuda-ipc": re.compile(
        r"^\[.*CudaIPCTypes\.cpp:\d+\](?: Warning:)? Producer process has been terminated"
    ),
    "resource-warning": re.compile(r"^\S.*:\d+: ResourceWarning: .*$"),
}
# Tracebacks without a first line; the first frame tells them from one that the program prints.
_BARE_TRACEBACKS = {
    "finalizer-error": ('weakref.py"', "in _exitfunc"),
    "thread-error": ('multiprocessing/queues.py"', "in _feed"),
}
# torchrun --tee and similar launchers print the worker before each line.
_PREFIX = re.compile(r"\[[^\[\]\s]{1,64}\]:[ ]?")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The first lines of messages: by their start, for which one search of a chunk is enough, or by a
# phrase, if the message begins with a path or as a log record.
_STARTS = re.compile(
    rb"\n(?=[\[ETFSBIAtfmdc*\x1b])(?:\[[^\[\]\s]{1,64}\]: ?)?(?:\x1b\[[0-9;]*m)*"
    rb"(?:Exception (?:ignored |in thread )|Traceback \(most|Error in atexit\.|\[W|Fatal Python err"
    rb"|terminate called |free\(\)|malloc\(\)|munmap_|double free|corrupted size|\*\*\* stack"
    rb"|Segmentation fault|Bus error|Illegal instr|Floating point e|Aborted)"
)
_PHRASES = (
    b"resource_tracker: There appear to be ",
    b": ResourceWarning: ",
    b"Task was destroyed but it is pending!",
    b" exception was never retrieved",
    b"unhandled exception during asyncio.run() shutdown",
    b"an error occurred during closing of asynchronous generator ",
    b": Assertion `",
    b": line ",  # bash, about a command that crashed
)


@dataclass(frozen=True)
class Message:
    """A complete message: the finding, and the type of the error in it."""

    finding: Finding
    error: str = ""

    @property
    def is_recorded(self) -> bool:
        """Whether the probe, if there is one, records the event as well.

        Python reports the others without a hook: errors of finalizers at exit and of the threads
        that feed queues by a traceback, and pending tasks by the log.
        """
        return bool(self.error) and not self.finding.evidence.startswith(_TRACEBACK)


@dataclass
class _Partial:
    """A message that may have more lines.

    Attributes:
        id: The id of the finding; "" for a traceback without a first line.
        where: The place of the error, for the summary.
        lines: The lines so far.
        error: The last line with an error, or "".
        is_open: Whether the error at the end of a traceback has not come yet.
    """

    id: str
    where: str
    lines: list[str] = field(default_factory=list)
    error: str = ""
    is_open: bool = True


class StderrText:
    """Recognises messages in a stream of bytes.

    Attributes:
        messages: The messages, of one type of error the first twenty.
        fatal: The lines from the first fatal error on, with the stacks after it.
        crashes: The first lines of messages about crashes.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.fatal: list[str] = []
        self.crashes: list[str] = []
        self._rest = b""
        self._partial: dict[str, _Partial] = {}  # by prefix
        self._numbers: Counter[tuple[str, str]] = Counter()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        head, found, rest = data.rpartition(b"\n")
        if found:
            self._parse(b"\n" + self._rest + head)
            self._rest = b""
        self._rest = (self._rest + rest)[-2 * _MAX_LINE :]

    def close(self) -> None:
        """Take the last line, which may have no end, and finish all messages."""
        self._parse(b"\n" + self._rest)
        for prefix in list(self._partial):
            self._finish(prefix)

    def _parse(self, chunk: bytes) -> None:
        """Parse complete lines, each with a line feed before it."""
        if b"\r" in chunk:  # A progress bar returns to the start of its line.
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        may_begin = _STARTS.search(chunk) is not None or any(word in chunk for word in _PHRASES)
        if not (may_begin or self._partial or 0 < len(self.fatal) < _MAX_LINES):
            return
        for raw in chunk[1:].split(b"\n"):
            line = _ANSI.sub("", raw[:_MAX_LINE].decode("utf-8", "replace"))
            if 0 < len(self.fatal) < _MAX_LINES:
                self.fatal.append(line)
            match = _PREFIX.match(line) if line.startswith("[") else None
            prefix = match[0].rstrip() if match else ""
            line = line[match.end() :] if match else line
            message = self._partial.get(prefix)
            if message is None or not self._continue(message, prefix, line):
                self._begin(prefix, line)

    def _continue(self, message: _Partial, prefix: str, line: str) -> bool:
        """Add a line to a message; return False if the line does not belong to it."""
        if message.id == "crash":
            belongs = bool(_AFTER_FATAL_PYTHON.match(line))
            message.is_open = belongs and not line
        elif message.is_open and line.startswith((" ", "\t", "  |")):
            belongs = True
            match = _ERROR.match(line)
            if match and line.startswith("  | ") and not message.error:
                message.error = line[4:]  # An exception group.
        elif message.is_open and (line == _TRACEBACK or _ASYNCIO_OBJECT.match(line)):
            belongs = True
        elif message.is_open and (match := _ERROR.match(line)):
            # Without a traceback, only a usual name shows that the line is an error.
            belongs = _TRACEBACK in message.lines or _USUAL_NAME.search(match["name"]) is not None
            message.error, message.is_open = line if belongs else "", not belongs
        else:
            belongs = not line or line in _BETWEEN
            message.is_open = message.is_open or line in _BETWEEN
        if belongs and len(message.lines) < _MAX_LINES:
            message.lines.append(line)
        if not belongs or (message.id == "crash" and not message.is_open):
            self._finish(prefix)
        return belongs

    def _begin(self, prefix: str, line: str) -> None:
        if match := _IGNORED.match(line) or _AT_EXIT.match(line):
            what = match["what"].strip(" :")
            for word in ("atexit callback", "thread started by"):
                what = what.removeprefix(word).strip(" :")
            self._open(prefix, _id_of(line), f"in {what}" if what else "", line)
        elif match := _IN_THREAD.match(line):
            self._open(prefix, "thread-error", f"in thread {match['what']!r}", line)
        elif line == _TRACEBACK:
            self._open(prefix, "", "", line)
        elif match := _ASYNCIO.match(line):
            self._open(prefix, "unraisable", "", line[match.start("what") :])
        elif line.startswith(_FATAL_PYTHON):
            self.fatal = self.fatal or [line]
            self._open(prefix, "crash", "", line)
        elif match := _TRACKER.match(line):
            is_semaphore = match["kind"].startswith("sem")
            found = "leaked-semaphore" if is_semaphore else "leaked-shared-memory"
            names = match["names"].strip(" :")
            summary = f"{match['count']} {match['kind']} objects" + (f": {names}" if names else "")
            self._add(Finding(found, summary, line))
        elif _FATAL.match(line) or _SHELL.match(line):
            if _FATAL.match(line):
                self.fatal = self.fatal or [line]
            self.crashes = [*self.crashes, line.strip()][:_LISTED]
        else:
            for found, pattern in _SINGLE_LINES.items():
                if pattern.match(line):
                    self._add(Finding(found, line, line))

    def _open(self, prefix: str, found: str, where: str, line: str) -> None:
        if len(self._partial) < _MAX_PREFIXES:
            self._partial[prefix] = _Partial(found, where, [line])

    def _finish(self, prefix: str) -> None:
        message = self._partial.pop(prefix)
        if message.id == "crash":
            if len(message.lines) > 1:
                self.crashes = [*self.crashes, message.lines[0].strip()][:_LISTED]
            return
        asyncio = len(message.lines) > 1 and _ASYNCIO_OBJECT.match(message.lines[1])
        if asyncio and _ASYNCIO.match(message.lines[0]):
            self._add(Finding("unraisable", message.lines[0], "\n".join(message.lines)))
            return
        found = message.id
        for one, (file, function) in _BARE_TRACEBACKS.items() if not found else ():
            if any(file in line and line.endswith(function) for line in message.lines[1:2]):
                found = one
        match = _ERROR.match(message.error)
        if found and match and not _ASYNCIO.match(message.lines[0]):
            summary = f"{message.error} {message.where}".strip()
            self._add(Finding(found, summary, "\n".join(message.lines)), match["name"])

    def _add(self, finding: Finding, error: str = "") -> None:
        key = finding.id, error.rpartition(".")[2]
        self._numbers[key] += 1
        if self._numbers[key] <= _LISTED:
            self.messages.append(Message(finding, error))


def _id_of(line: str) -> str:
    """Return the id of the finding for the first line of a message."""
    start = line.partition("<")[0]
    if "atexit" in start:
        return "atexit-error"
    if "thread started by" in start:
        return "thread-error"
    if "<finalize object" in line or "weakref callback" in line:
        return "finalizer-error"
    return "unraisable"
