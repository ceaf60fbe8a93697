"""What a program says on stderr about its own end: the second source, and often the only one.

Messages of Python 3.10 to 3.14, asyncio, torch, the resource tracker, native libraries and shells
are recognised by their first line and the lines that Python prints after it. Looks at bytes, and
decodes only chunks that may have a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clean_exit.findings import Finding

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 200  # of one message
_MOST_FOUND = 1000
_MOST_SPEAKERS = 256

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
_FATAL_PYTHON_GOES_ON = re.compile(
    r"^(Python runtime state: |(Current t|T)hread 0x|<no Python f|$)"
)
# "Segmentation fault", as dash says it; "x.sh: line 3: 12 Aborted   (core dumped) ./a", as bash.
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
# A traceback without a line before it, told by its first frame from what a program prints.
_BARE_TRACEBACKS = {
    "finalizer-error": ('weakref.py"', "in _exitfunc"),
    "thread-error": ('multiprocessing/queues.py"', "in _feed"),
}
# torchrun --tee and its like put the worker before each line.
_SPEAKER = re.compile(r"\[[^\[\]\s]{1,64}\]:[ ]?")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Lines that may begin a message: by their start, which one search finds in a whole chunk (it
# jumps from one line's end to the next), or by a phrase within, for messages that begin with a
# path or as a log record does.
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
    b": line ",  # bash, of a command that crashed
)


@dataclass(frozen=True)
class Said:
    """One message: the finding, and the type of the error in it."""

    finding: Finding
    error: str = ""


@dataclass
class _Message:
    """A message of several lines, of which the first has come.

    Attributes:
        id: Of the finding that it will be; empty for a traceback without a line before it.
        where: What it is about, for the summary.
        lines: So far.
        error: The last line with an error, or empty.
        is_open: Whether a traceback is under way, whose error has not come.
    """

    id: str
    where: str
    lines: list[str] = field(default_factory=list)
    error: str = ""
    is_open: bool = True


class StderrText:
    """Recognises messages in a stream of bytes.

    Attributes:
        said: What was recognised; of much, the first.
        fatal: What a crash printed: Python's fatal errors, and the stacks after them.
        crashes: The first lines of what crashes printed, or shells about them.
    """

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.fatal: list[str] = []
        self.crashes: list[str] = []
        self._rest = b""
        self._messages: dict[str, _Message] = {}  # under way, by speaker

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        head, found, rest = data.rpartition(b"\n")
        if found:
            self._look_at(b"\n" + self._rest + head)
            self._rest = b""
        self._rest = (self._rest + rest)[-2 * _LONGEST_LINE :]

    def close(self) -> None:
        """Take what came without an end of line."""
        self._look_at(b"\n" + self._rest)
        for speaker in list(self._messages):
            self._finish(speaker)

    def _look_at(self, chunk: bytes) -> None:
        """Take whole lines, each after its own line feed."""
        if b"\r" in chunk:  # A line of progress, behind which a message begins anew.
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        may_begin = _STARTS.search(chunk) is not None or any(word in chunk for word in _PHRASES)
        if not (may_begin or self._messages or 0 < len(self.fatal) < _MOST_LINES):
            return
        for raw in chunk[1:].split(b"\n"):
            line = _ANSI.sub("", raw[:_LONGEST_LINE].decode("utf-8", "replace"))
            if 0 < len(self.fatal) < _MOST_LINES:
                self.fatal.append(line)
            match = _SPEAKER.match(line) if line.startswith("[") else None
            speaker = match[0].rstrip() if match else ""
            line = line[match.end() :] if match else line
            message = self._messages.get(speaker)
            if message is None or not self._continue(message, speaker, line):
                self._begin(speaker, line)

    def _continue(self, message: _Message, speaker: str, line: str) -> bool:
        """Add a line to the message under way; False if it does not belong to it."""
        if message.id == "crash":
            belongs = bool(_FATAL_PYTHON_GOES_ON.match(line))
            message.is_open = belongs and not line
        elif message.is_open and line.startswith((" ", "\t", "  |")):
            belongs = True
            match = _ERROR.match(line)
            if match and line.startswith("  | ") and not message.error:
                message.error = line[4:]  # Of a group of exceptions.
        elif message.is_open and (line == _TRACEBACK or _ASYNCIO_OBJECT.match(line)):
            belongs = True
        elif message.is_open and (match := _ERROR.match(line)):
            # Without a traceback only what has the name of an error is one.
            belongs = _TRACEBACK in message.lines or _USUAL_NAME.search(match["name"]) is not None
            message.error, message.is_open = line if belongs else "", not belongs
        else:
            belongs = not line or line in _BETWEEN
            message.is_open = message.is_open or line in _BETWEEN
        if belongs and len(message.lines) < _MOST_LINES:
            message.lines.append(line)
        if not belongs or (message.id == "crash" and not message.is_open):
            self._finish(speaker)
        return belongs

    def _begin(self, speaker: str, line: str) -> None:
        if match := _IGNORED.match(line) or _AT_EXIT.match(line):
            what = match["what"].strip(" :")
            for word in ("atexit callback", "thread started by"):
                what = what.removeprefix(word).strip(" :")
            self._open(speaker, _Message(_kind_of(line), f"in {what}" if what else "", [line]))
        elif match := _IN_THREAD.match(line):
            self._open(speaker, _Message("thread-error", f"in thread {match['what']!r}", [line]))
        elif line == _TRACEBACK:
            self._open(speaker, _Message("", "", [line]))
        elif match := _ASYNCIO.match(line):
            self._open(speaker, _Message("unraisable", "", [line[match.start("what") :]]))
        elif line.startswith(_FATAL_PYTHON):
            self.fatal = self.fatal or [line]
            self._open(speaker, _Message("crash", "", [line]))
        elif match := _TRACKER.match(line):
            found = (
                "leaked-semaphore" if match["kind"].startswith("sem") else "leaked-shared-memory"
            )
            names = match["names"].strip(" :")
            summary = f"{match['count']} {match['kind']} objects" + (f": {names}" if names else "")
            self._note(Finding(found, summary, line))
        elif _FATAL.match(line) or _SHELL.match(line):
            if _FATAL.match(line):
                self.fatal = self.fatal or [line]
            self._note_crash(line)
        else:
            for found, pattern in _SINGLE_LINES.items():
                if pattern.match(line):
                    self._note(Finding(found, line, line))

    def _open(self, speaker: str, message: _Message) -> None:
        if len(self._messages) < _MOST_SPEAKERS:
            self._messages[speaker] = message

    def _finish(self, speaker: str) -> None:
        message = self._messages.pop(speaker)
        if message.id == "crash":
            if len(message.lines) > 1:
                self._note_crash(message.lines[0])
            return
        asyncio = len(message.lines) > 1 and _ASYNCIO_OBJECT.match(message.lines[1])
        if asyncio and _ASYNCIO.match(message.lines[0]):
            summary = message.lines[0]
            self._note(Finding("unraisable", summary, "\n".join(message.lines)))
            return
        found = message.id
        for one, (file, function) in _BARE_TRACEBACKS.items() if not found else ():
            if any(file in line and line.endswith(function) for line in message.lines[1:2]):
                found = one
        match = _ERROR.match(message.error)
        if found and match and not _ASYNCIO.match(message.lines[0]):
            summary = f"{message.error} {message.where}".strip()
            self._note(Finding(found, summary, "\n".join(message.lines)), match["name"])

    def _note_crash(self, line: str) -> None:
        if len(self.crashes) < _MOST_FOUND:
            self.crashes.append(line.strip())

    def _note(self, finding: Finding, error: str = "") -> None:
        if len(self.said) < _MOST_FOUND:
            self.said.append(Said(finding, error))


def _kind_of(line: str) -> str:
    """Return the finding that a message with this first line is."""
    start = line.partition("<")[0]
    if "atexit" in start:
        return "atexit-error"
    if "thread started by" in start:
        return "thread-error"
    if "<finalize object" in line or "weakref callback" in line:
        return "finalizer-error"
    return "unraisable"
