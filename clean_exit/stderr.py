"""Recognise the messages on stderr about a program's end; often nothing else shows a fault.

The parser knows messages of Python 3.11 to 3.14, asyncio, torch, the resource tracker, native
libraries and shells. It decodes only the chunks that may contain a message.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from clean_exit.findings import Finding

_MAX_LINE = 64 * 1024
_MAX_LINES = 200  # of one message
_LISTED = 20  # messages with the same type of error, as in the probe

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"^(?:  \| )?(?P<name>[A-Za-z_][\w.]*)(?::? .*|$)")
_USUAL_NAME = re.compile(r"(Error|Exception|Exit|Interrupt|Warning|Iteration|Group|Abort)$")
_BETWEEN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# The second line of what an event loop logs: a task, or what aiohttp has not closed.
_ASYNCIO_OBJECT = re.compile(
    r"^(?:(?:task|future|asyncgen|client_session): <\w|client_connection: \w|connect(?:ions|or): )"
)
_FATAL = re.compile(
    r"^(?:terminate called (?:after throwing an instance of '.+'|without an active exception"
    r"|recursively)$"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): [a-z].*$|double free or corruption \(.*\)$"
    r"|corrupted size vs\. prev_size|\*\*\* stack smashing detected \*\*\*: "
    r"|\S+: .*: Assertion `.*' failed\.$)"
)
_BELONGING = r"(?P<what>.*?):?$"
# The first lines of messages with more lines, and their findings; "" for a bare traceback.
_FIRST_LINES = [
    (found, re.compile(pattern))
    for found, pattern in (
        ("atexit-error", r"Error in atexit\._run_exitfuncs:(?P<what>)$"),
        ("atexit-error", r"Exception ignored in atexit callback:? " + _BELONGING),
        ("thread-error", r"Exception ignored in thread started by:? " + _BELONGING),
        ("thread-error", r"Exception in (?P<what>thread .+):$"),
        ("finalizer-error", r"Exception ignored in: (?P<what><finalize object .*)$"),
        ("finalizer-error", r"Exception ignored while calling weakref callback " + _BELONGING),
        ("unraisable", r"Exception ignored (?:in|on|while|when|from)\b:? ?" + _BELONGING),
        ("", re.escape(_TRACEBACK) + "(?P<what>)$"),
        ("crash", r"Fatal Python error: (?P<what>)"),
        (
            "unraisable",
            r"(?:.*\W)?(?P<asyncio>Task was destroyed but it is pending!"
            r"|(?:Task|Future|_GatheringFuture) exception was never retrieved"
            r"|Unclosed (?:client session|connection|connector)"
            r"|unhandled exception during asyncio\.run\(\) shutdown"
            r"|an error occurred during closing of asynchronous generator <.*>)$",
        ),
    )
]
_AFTER_FATAL_PYTHON = re.compile(r"^(Python runtime state: |(Current t|T)hread 0x|<no Python f|$)")
# dash prints "Segmentation fault"; bash prints "x.sh: line 3: 12 Aborted   (core dumped) ./a".
_SHELL = re.compile(
    r"^(?:(?:Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    r"(?: \(core dumped\))?|Aborted \(core dumped\)"
    r"|[^\s:][^:]*: (?:line )?\d+: +\d+ (?:Segmentation fault|Bus error|Illegal instruction"
    r"|Floating point exception|Aborted)\b.*)\s*$"
)
_TRACKER = (
    r"^\S.*resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be \d+ leaked "
)
_SINGLE_LINES = {
    "leaked-semaphore": re.compile(_TRACKER + r"sem\w+ objects? to clean up at shutdown"),
    "leaked-shared-memory": re.compile(_TRACKER + r"(?!sem)\w+ objects? to clean up at shutdown"),
    "process-group-not-destroyed": re.compile(
        r"^\[.*ProcessGroup\w*\.cpp:\d+\].*"
        r"(destroy_process_group\(\) was not called|has NOT been destroyed)"
    ),
    "cuda-ipc": re.compile(
        r"^\[.*CudaIPCTypes\.cpp:\d+\](?: Warning:)? Producer process has been terminated"
    ),
    "resource-warning": re.compile(
        r"^(?:\S.*:\d+: (?:ResourceWarning: .*|RuntimeWarning: coroutine .* was never awaited)"
        r"|nanobind: leaked \d+ .*|swig/python detected a memory leak of type .*)$"
    ),
}
# Tracebacks without a first line; the first frame tells them from one that the program prints.
_BARE_TRACEBACKS = (
    ("finalizer-error", 'weakref.py"', "in _exitfunc"),
    ("finalizer-error", 'multiprocessing/util.py"', "in _run_finalizers"),
    ("thread-error", 'multiprocessing/queues.py"', "in _feed"),
)
# Colours, and the worker that torchrun --tee and similar launchers print before each line.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"\[[^\[\]\s]{1,64}\]: ?")
# A chunk without any of these has no message, and its lines are not looked at.
_WORDS = (
    b"Exception |Traceback (|Error in atexit.|Fatal Python|ProcessGroup|CudaIPC|resource_tracker:"
    b"|ResourceWarning:|never awaited|nanobind: leaked|swig/python|Task |Unclosed "
    b"| never retrieved|asyncio.run()|asynchronous generator"
    b"|Assertion `|: line |terminate called|free()|lloc()|munmap_|double free|corrupted size"
    b"|stack smashing|Segmentation fault|Bus error|Illegal instr|Floating point|Aborted"
).split(b"|")


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
        asyncio: Whether asyncio has logged it, which needs a line about the object.
        is_open: Whether the error at the end of a traceback has not come yet.
    """

    id: str
    where: str
    lines: list[str]
    asyncio: bool = False
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
        self._partial: _Partial | None = None
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
        self._finish()

    def _parse(self, chunk: bytes) -> None:
        """Parse complete lines, each with a line feed before it."""
        if b"\r" in chunk:  # A progress bar returns to the start of its line.
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        may_begin = any(word in chunk for word in _WORDS)
        if not (may_begin or self._partial or 0 < len(self.fatal) < _MAX_LINES):
            return
        for raw in chunk[1:].split(b"\n"):
            line = _COLOUR.sub("", raw[:_MAX_LINE].decode("utf-8", "replace"))
            if 0 < len(self.fatal) < _MAX_LINES:
                self.fatal.append(line)
            line = _PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line
            if self._partial is None or not self._continue(self._partial, line):
                self._begin(line)

    def _continue(self, message: _Partial, line: str) -> bool:
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
            self._finish()
        return belongs

    def _begin(self, line: str) -> None:
        for found, pattern in _FIRST_LINES:
            if match := pattern.match(line):
                logged = match.groupdict().get("asyncio")
                where = "" if logged or not match["what"] else f"in {match['what']}"
                self._partial = _Partial(found, where, [logged or line], bool(logged))
                if found == "crash":
                    self.fatal = self.fatal or [line]
                return
        if _FATAL.match(line) or _SHELL.match(line):
            if _FATAL.match(line):
                self.fatal = self.fatal or [line]
            self.crashes = [*self.crashes, line.strip()][:_LISTED]
        for found, pattern in _SINGLE_LINES.items():
            if pattern.match(line):
                self._add(Finding(found, line, line))

    def _finish(self) -> None:
        message, self._partial = self._partial, None
        if message is None:
            return
        text = "\n".join(message.lines)
        if message.id == "crash":
            if len(message.lines) > 1:
                self.crashes = [*self.crashes, message.lines[0].strip()][:_LISTED]
        elif message.asyncio:
            if any(map(_ASYNCIO_OBJECT.match, message.lines[1:2])):
                self._add(Finding("unraisable", message.lines[0], text))
        elif match := _ERROR.match(message.error):
            found = message.id
            for one, file, function in _BARE_TRACEBACKS if not found else ():
                if any(file in line and line.endswith(function) for line in message.lines[1:2]):
                    found = one
            if found:
                summary = f"{message.error} {message.where}".strip()
                self._add(Finding(found, summary, text), match["name"])

    def _add(self, finding: Finding, error: str = "") -> None:
        key = finding.id, error.rpartition(".")[2]
        self._numbers[key] += 1
        if self._numbers[key] <= _LISTED:
            self.messages.append(Message(finding, error))
