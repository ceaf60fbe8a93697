"""What a program says on stderr about its own end: the second source, and often the only one.

Reads line by line, however much there is. A phrase alone is not evidence, for programs quote
such phrases: each message is recognised with the lines that Python prints around it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .findings import Finding

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 200  # of one message
_MOST_FOUND = 100  # more of them say nothing new

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_IGNORED = re.compile(
    r"^Exception ignored (?P<how>in|on|while|when|from)\b(?P<what>.*)$"
    r"|^Error in atexit\._run_exitfuncs:$"
)
_IN_THREAD = re.compile(r"^Exception in thread (?P<what>.+):$")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Group|Abort)\w*"
    r"|[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$"
)
_BARE_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b")
_TRACKER = re.compile(
    r"^\S.*resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be "
    r"(?P<count>\d+) leaked (?P<kind>\w+) objects? to clean up at shutdown(?P<names>.*)$"
)
_GROUP = re.compile(
    r"^\[.*ProcessGroup\w*\.cpp:\d+\].*"
    r"(destroy_process_group\(\) was not called|has NOT been destroyed)"
)
_CUDA_IPC = re.compile(r"^\[.*CudaIPCTypes\.cpp:\d+\] Producer process has been terminated")
_RESOURCE_WARNING = re.compile(r"^\S.*:\d+: ResourceWarning: (?P<message>.*)$")
_FATAL = re.compile(r"^(Fatal Python error: |terminate called |\S+: .*Assertion .* failed)")


@dataclass(frozen=True)
class Said:
    """One message: the finding, and the type of the error in it."""

    finding: Finding
    error: str = ""


@dataclass
class _Block:
    """A message of several lines, of which the first has come."""

    id: str
    summary: str
    lines: list[str] = field(default_factory=list)
    in_traceback: bool = False


class StderrText:
    """Recognises messages in a stream of bytes.

    Attributes:
        said: What was recognised.
        fatal: What a crash printed: Python's fatal errors, and the stacks after them.
    """

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.fatal: list[str] = []
        self._rest = b""
        self._block: _Block | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _LONGEST_LINE:  # No message of Python's has such lines.
            self._rest = self._rest[-_LONGEST_LINE:]

    def close(self) -> None:
        """Take what came without an end of line."""
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        if self._block is not None:
            self._finish("")

    def _take(self, raw: bytes) -> None:
        line = _ANSI.sub("", raw[:_LONGEST_LINE].decode("utf-8", "replace")).rstrip("\r")
        if self.fatal and len(self.fatal) < _MOST_LINES:
            self.fatal.append(line)
        if self._block is not None and self._continue(self._block, line):
            return
        self._begin(line)

    def _continue(self, block: _Block, line: str) -> bool:
        """Add a line to the message under way; False if it does not belong to it."""
        if line == _TRACEBACK and not block.in_traceback:
            block.in_traceback = True
        elif block.in_traceback and (line.startswith((" ", "\t")) or not line):
            pass
        elif block.in_traceback or _BARE_ERROR.match(line):
            if _ERROR.match(line):
                block.lines.append(line)
                self._finish(line)
                return True
            self._block = None
            return False
        else:
            self._block = None  # Python would have gone on otherwise: it was a quotation.
            return False
        if len(block.lines) < _MOST_LINES:
            block.lines.append(line)
        return True

    def _begin(self, line: str) -> None:
        if match := _IGNORED.match(line):
            self._block = _Block(_kind_of(line), _summary_of(match), [line])
        elif match := _IN_THREAD.match(line):
            self._block = _Block("thread-error", f"in thread {match['what']!r}", [line])
        elif line == _TRACEBACK:
            self._block = _Block("", "", [line], in_traceback=True)
        elif match := _TRACKER.match(line):
            self._note(_leak(match, line))
        elif _GROUP.match(line):
            summary = "call torch.distributed.destroy_process_group() before the program ends"
            self._note(Finding("process-group-not-destroyed", summary, line))
        elif _CUDA_IPC.match(line):
            self._note(Finding("cuda-ipc", "the producer ended before its consumers", line))
        elif match := _RESOURCE_WARNING.match(line):
            self._note(Finding("resource-warning", match["message"], line))
        elif _FATAL.match(line) and not self.fatal:
            self.fatal.append(line)

    def _finish(self, error_line: str) -> None:
        block, self._block = self._block, None
        if block is None or not error_line:
            return
        if not block.id:
            # A bare traceback: the program's own, or what a finalizer raised while it ended.
            if not any('weakref.py"' in x and "in _exitfunc" in x for x in block.lines):
                return
            block.id = "finalizer-error"
        match = _ERROR.match(error_line)
        name = match["name"] if match else ""
        evidence = "\n".join(block.lines)
        summary = f"{error_line} {block.summary}".strip()
        self._note(Finding(block.id, summary, evidence), name)

    def _note(self, finding: Finding, error: str = "") -> None:
        if len(self.said) < _MOST_FOUND:
            self.said.append(Said(finding, error))


def _kind_of(line: str) -> str:
    if "atexit" in line.partition("<")[0]:
        return "atexit-error"
    if "thread started by" in line.partition("<")[0]:
        return "thread-error"
    if "<finalize object" in line or "weakref callback" in line:
        return "finalizer-error"
    return "unraisable"


def _summary_of(match: re.Match[str]) -> str:
    what = (match["what"] or "").strip(" :")
    for word in ("atexit callback", "thread started by"):
        what = what.removeprefix(word).strip(" :")
    return f"in {what}" if what else ""


def _leak(match: re.Match[str], line: str) -> Finding:
    found = "leaked-semaphore" if match["kind"].startswith("sem") else "leaked-shared-memory"
    names = match["names"].strip(" :")
    summary = f"{match['count']} {match['kind']} objects" + (f": {names}" if names else "")
    return Finding(found, summary, line)
