"""What a program says on stderr about its own end: the second source, and often the only one.

Looks at bytes, and decodes only lines that may begin a message, or go on with one. A phrase alone
is not evidence, for programs quote such phrases: each message is recognised with the lines that
Python prints around it.
"""

from __future__ import annotations

import re
from collections import Counter

from .findings import Finding
from .messages import (
    ASYNCIO,
    CUDA_IPC,
    END_OF_GROUP,
    ERROR,
    ERROR_IN_GROUP,
    FATAL,
    GROUP_TRACEBACK,
    IGNORED,
    IN_THREAD,
    PROCESS_GROUP,
    RESOURCE_WARNING,
    SHELL,
    TRACEBACK,
    TRACKER,
    Block,
    Said,
    is_bare_error,
    kind_of,
    leak,
    summary_of,
)

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 200  # of one message
_MOST_FOUND = 100  # more of them are only counted
_MOST_SPEAKERS = 256

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


class StderrText:
    """Recognises messages in a stream of bytes.

    Attributes:
        said: What was recognised; of much, the first.
        counts: How often, by finding and type of error.
        fatal: What a crash printed: Python's fatal errors, and the stacks after them.
        crashes: The first lines of what crashes printed, or shells about them.
        says_aborted: Whether a line is all that dash says of an abort, and others say as well.
    """

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.fatal: list[str] = []
        self.crashes: list[str] = []
        self.says_aborted = False
        self._rest = b""
        self._blocks: dict[str, Block] = {}  # under way, by who speaks

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        head, found, rest = data.rpartition(b"\n")
        if not found:
            self._rest += rest
        else:
            self._look_at(b"\n" + self._rest + head)
            self._rest = rest
        if len(self._rest) > 2 * _LONGEST_LINE:  # No message of Python's has such lines.
            self._rest = self._rest[:_LONGEST_LINE]

    def close(self) -> None:
        """Take what came without an end of line."""
        if self._rest:
            self._look_at(b"\n" + self._rest)
            self._rest = b""
        for speaker in list(self._blocks):
            self._finish(speaker)

    def _look_at(self, chunk: bytes) -> None:
        """Take whole lines, each after its own line feed."""
        if b"\r" in chunk:  # A line of progress, behind which a message begins anew.
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        collects = self.fatal and len(self.fatal) < _MOST_LINES
        if not (collects or self._blocks or _may_begin(chunk)):
            return
        for raw in chunk[1:].split(b"\n"):
            collects = self.fatal and len(self.fatal) < _MOST_LINES
            if collects or self._blocks or _may_begin(b"\n" + raw):
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        line = _ANSI.sub("", raw[:_LONGEST_LINE].decode("utf-8", "replace"))
        if self.fatal and len(self.fatal) < _MOST_LINES:
            self.fatal.append(line)
        speaker = ""
        if line.startswith("[") and (match := _SPEAKER.match(line)):
            speaker, line = match[0].rstrip(), line[match.end() :]
        block = self._blocks.get(speaker)
        if block is not None and self._continue(block, speaker, line):
            return
        self._begin(speaker, line)

    def _continue(self, block: Block, speaker: str, line: str) -> bool:
        """Add a line to the message under way; False if it does not belong to it."""
        belongs = True
        if block.error:  # It is complete, unless it was one of a chain of errors.
            belongs = block.goes_on_with(line)
        elif block.confirmed_by is not None:
            belongs = block.confirm(line)
        elif block.in_group:
            match = ERROR_IN_GROUP.match(line)
            block.group_error = block.group_error or (match[1] if match else "")
            belongs = line.startswith("  ")
            if not belongs or END_OF_GROUP.match(line):
                block.error = block.group_error
        elif GROUP_TRACEBACK.match(line):
            block.in_group = True
        elif line == TRACEBACK and not block.in_traceback:
            block.in_traceback = True
        elif block.in_traceback and (line.startswith((" ", "\t")) or not line):
            pass
        elif (block.in_traceback or is_bare_error(line)) and ERROR.match(line):
            block.error = line
        else:  # Python would have gone on otherwise: it was a quotation.
            belongs = False
        if belongs and len(block.lines) < _MOST_LINES:
            block.lines.append(line)
        if not belongs:
            self._finish(speaker)
        return belongs

    def _begin(self, speaker: str, line: str) -> None:
        if match := IGNORED.match(line):
            self._open(speaker, Block(kind_of(line), summary_of(match), [line]))
        elif match := IN_THREAD.match(line):
            self._open(speaker, Block("thread-error", f"in thread {match['what']!r}", [line]))
        elif line == TRACEBACK:
            self._open(speaker, Block("", "", [line], in_traceback=True))
        elif match := ASYNCIO.match(line):
            block = Block("unraisable", "", [line[match.start("what") :]], needs="asyncio")
            block.confirmed_by = re.compile(r"^(task|future|asyncgen): <\w")
            block.is_chained = not match["what"].endswith("pending!")
            self._open(speaker, block)
        elif match := TRACKER.match(line):
            self._note(leak(match, line), needs="resource_tracker")
        elif PROCESS_GROUP.match(line):
            summary = "call torch.distributed.destroy_process_group() before the program ends"
            self._note(Finding("process-group-not-destroyed", summary, line))
        elif CUDA_IPC.match(line):
            self._note(Finding("cuda-ipc", "not all were released when their producer ended", line))
        elif match := RESOURCE_WARNING.match(line):
            self._note(Finding("resource-warning", match["message"], line))
        elif match := FATAL.match(line):
            self._begin_crash(speaker, line, match)
        elif SHELL.match(line):
            self._note_crash(line)
        elif line == "Aborted":
            self.says_aborted = True

    def _begin_crash(self, speaker: str, line: str, match: re.Match[str]) -> None:
        if not self.fatal:
            self.fatal.append(line)
        if match["python"]:
            block = Block("crash", "", [line])
            block.confirmed_by = re.compile(
                r"^(Python runtime state: |Current thread |Thread 0x|<no Python frame>)"
            )
            self._open(speaker, block)
        else:
            self._note_crash(line)

    def _note_crash(self, line: str) -> None:
        if len(self.crashes) < _MOST_FOUND:
            self.crashes.append(line.strip())

    def _open(self, speaker: str, block: Block) -> None:
        if len(self._blocks) < _MOST_SPEAKERS:
            self._blocks[speaker] = block

    def _finish(self, speaker: str) -> None:
        block = self._blocks.pop(speaker)
        error_line = block.error or block.group_error
        if block.id == "crash" and error_line:
            self._note_crash(error_line)
            return
        if not error_line:
            return
        if not block.id and not block.identify():
            return
        match = ERROR.match(error_line)
        name = match["name"] if match and block.needs != "asyncio" else ""
        evidence = "\n".join(block.lines)
        summary = f"{error_line} {block.summary}".strip()
        self._note(Finding(block.id, summary, evidence), name, block.needs)

    def _note(self, finding: Finding, error: str = "", needs: str = "") -> None:
        self.counts[finding.id, error.rpartition(".")[2]] += 1
        if len(self.said) < _MOST_FOUND:
            self.said.append(Said(finding, error, needs))


def _may_begin(chunk: bytes) -> bool:
    return _STARTS.search(chunk) is not None or any(phrase in chunk for phrase in _PHRASES)
