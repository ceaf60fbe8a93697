"""Run a program to its end and beyond: until all that it started is gone, or was ended."""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import signal
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .events import Growth, Inside, read_events
from .gpu import memory_of_processes
from .keeping import Keeper
from .processes import Process, descendants, read_process
from .stacks import ask_for_stacks
from .stderr_text import StderrText
from .streams import Awaited, Copy, Stream

_TICK_S = 0.25  # how often the clock is looked at while the program runs
_TICK_AFTER_S = 0.02  # and when it has ended
_PATIENCE_S = 2.0  # for what outlives the program
_PATIENCE_WITH_HELPERS_S = 15.0  # for Python's own, and what ends: they have to be scheduled first
_AFTER_STOP_S = 60.0  # for a program that was asked to stop, unless a timeout says otherwise
_ROOM_OF_PIPE = 1 << 20
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)
_END_EARLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Limits:
    """When to stop a program, in seconds; None for never."""

    timeout_s: float | None = None
    max_shutdown_s: float = 5.0
    stop_signal: int | None = None
    stop_after_s: float | None = None
    stop_when: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Stead:
    """What a process hands on that stands in a program's place, as the command does.

    Attributes:
        closed: Which of the files 0, 1 and 2 it was started without.
        mask: The signals that were blocked when it was started.
        on_start: Called when the program has started.
        hand_up: Called with each signal that the program sends to its parent, and the sender.
        stop: Called with the signal that has stopped the program, to be stopped by it as well.
    """

    closed: Collection[int] = ()
    mask: Collection[int] = ()
    on_start: Callable[[Run], None] = lambda run: None
    hand_up: Callable[[int, int], None] = lambda number, sender: None
    stop: Callable[[int], None] = lambda number: None


IN_STEAD: ContextVar[Stead | None] = ContextVar("clean_exit_in_stead", default=None)


@dataclass
class Outcome:
    """What was observed from outside. Times are on the monotonic clock."""

    returncode: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    stopped_s: float | None = None
    timed_out: bool = False
    stacks: str = ""
    left_over: list[Process] = field(default_factory=list)
    is_left: bool = False  # whether there is something, which may be too quick to be seen
    held_gpu_bytes: dict[int, int] = field(default_factory=dict)
    holds_output: bool = False


class Run:
    """One run of a program.

    Args:
        command: What to start.
        environment: Its environment.
        events: Where the probe writes to.
        limits: When to stop it.
        cwd: The folder that it starts in.
        stdin: As for `subprocess`; None for this process's own.
        copy_stdout: Whether stdout is read here; else the program has this process's own.
        echo: Whether what is read here is passed through as well.

    Raises:
        OSError: It could not be started.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        *,
        events: Path,
        limits: Limits,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = None,
        copy_stdout: bool = True,
        echo: bool = False,
    ) -> None:
        self._events, self._limits = events, limits
        self._stead = IN_STEAD.get()
        self.text = StderrText()
        self.stdout, self.stderr = Copy(), Copy()
        self._awaited = Awaited(limits.stop_when) if limits.stop_when is not None else None
        self.forwarded: set[int] = set()
        self._in_a_hurry = False
        self._next_look_s = 0.0
        self._last_seen_s = 0.0
        self._last_left: list[Process] = []
        self._new_events = Growth(events)
        self._streams: list[Stream] = []
        self.outcome = Outcome(started_s=time.monotonic())
        given = self._make_files(stdin, copy_stdout, echo)
        try:
            self.keeper = Keeper(
                command,
                environment,
                files=given,
                cwd=cwd,
                inherit=self._stead is not None,
                mask=self._stead.mask if self._stead else None,
                follows=self._stead is not None,
            )
        except BaseException:  # Whatever it is, it is raised: nobody else closes these.
            self._close_streams()
            raise
        finally:
            for file in self._to_close:
                os.close(file)
        if self._stead is not None:
            self._stead.on_start(self)

    def _make_files(
        self, stdin: int | IO[Any] | None, copy_stdout: bool, echo: bool
    ) -> dict[int, int]:
        """Make the pipes, and return what the program's files 0, 1 and 2 are to be."""
        closed = self._stead.closed if self._stead else ()
        given = {number: number for number in (0, 1) if number not in closed and _is_open(number)}
        self._to_close: list[int] = []
        if stdin == subprocess.DEVNULL:
            given[0] = os.open(os.devnull, os.O_RDWR)
            self._to_close.append(given[0])
        elif stdin is not None:
            if not isinstance(stdin, int) and not hasattr(stdin, "fileno"):
                raise TypeError(f"stdin has to be a file, DEVNULL or None, not {stdin!r}")
            given[0] = stdin if isinstance(stdin, int) else stdin.fileno()
            if given[0] < 0:
                raise ValueError("stdin has to be a file, DEVNULL or None")
        awaited = [self._awaited.feed] if self._awaited is not None else []
        if copy_stdout or (awaited and 1 in given):
            on_terminal = not copy_stdout and os.isatty(1)
            reader, given[1] = _make_terminal() if on_terminal else _make_pipe()
            self._to_close.append(given[1])
            copied = [self.stdout.feed] if copy_stdout else []
            sink = 1 if echo or not copy_stdout else None
            self._streams.append(Stream(reader, sink, [*copied, *awaited]))
        reader, given[2] = _make_pipe()
        self._to_close.append(given[2])
        watchers = [self.text.feed, self.stderr.feed, *awaited]
        self._streams.append(Stream(reader, 2 if echo else None, watchers))
        return given

    def finish(self) -> Outcome:
        """Wait until everything is over, end what is left, and say what was observed.

        Interrupted, it leaves nothing of the run behind.
        """
        try:
            self._watch()
        finally:
            try:
                self.keeper.end()
            finally:  # However impatient somebody is: without its checker the keeper ends all.
                self.keeper.close()
                self._close_streams()
        self.text.close()
        # Another user's, which could not be ended, has none.
        code = self.keeper.returncode
        self.outcome.returncode = -signal.SIGKILL if code is None else code
        return self.outcome

    def pass_on(self, number: int, sender: int) -> None:
        """Pass on a signal that this process got, from any thread; the program gets it once."""
        if sender == self.keeper.keeper_pid:
            return  # It has woken this process up, no more.
        self.forwarded.add(number)
        self._in_a_hurry = self._in_a_hurry or number in _END_EARLY
        self.keeper.pass_on(number, sender)

    def inside(self) -> Inside:
        """Read what the probe has recorded so far."""
        return read_events(self._events, self.keeper.pid)

    def shutdown_began_s(self, inside: Inside) -> float | None:
        """Return when the program began to end: asked to, or when its threads had been joined.

        Only the program's own end counts: that of a Python below it is a part of its work.
        """
        if self.outcome.stopped_s is not None:
            return self.outcome.stopped_s
        return inside.atexit_s if inside.pid == self.keeper.pid else None

    def _close_streams(self) -> None:
        for stream in self._streams:
            os.close(stream.file)
        self._streams = []

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream.file, selectors.EVENT_READ, stream)
            selector.register(self.keeper, selectors.EVENT_READ, None)
            while not self._is_over(selector):
                pass

    def _is_over(self, selector: selectors.BaseSelector) -> bool:
        """Do what is due now, and say whether the run has come to its end."""
        running = not self.outcome.ended_s
        for key, _ in selector.select(self._pause()):
            if key.data is None:
                self.keeper.hear()
                self._hand_up()
            elif not key.data.pump():
                selector.unregister(key.fd)
                os.close(key.fd)
                self._streams.remove(key.data)
        if running and self.keeper.returncode is not None:
            self.outcome.ended_s = time.monotonic()
        if not self.outcome.ended_s:
            self._stop_with_it()
            self._keep_limits()
        if self.keeper.is_alone and self.keeper in selector.get_map():
            selector.unregister(self.keeper)  # It has told all that there is.
        return not running and self._all_gone()

    def _hand_up(self) -> None:
        sent, self.keeper.for_parent = self.keeper.for_parent, []
        for number, sender in sent:
            if self._stead is not None:
                self._stead.hand_up(number, sender)

    def _stop_with_it(self) -> None:
        """Stop as the program has, so that a shell sees its job stopped; the keeper ends that."""
        number, self.keeper.stopped = self.keeper.stopped, None
        if self._stead is not None and number is not None:
            program = read_process(self.keeper.pid)
            if program is None or program.state == "T":  # Else it goes on already.
                self._stead.stop(number)

    def _pause(self) -> float:
        """Return how long to wait for news, so that the next moment that matters is not missed."""
        if self.outcome.ended_s or self.keeper.returncode is not None:
            return _TICK_AFTER_S
        now, limits = time.monotonic(), self._limits
        moments = [limits.timeout_s]
        if self.outcome.stopped_s is None and limits.stop_when is None:
            moments.append(limits.stop_after_s)
        waits = [self.outcome.started_s + m - now for m in moments if m is not None]
        return max(0.0, min([_TICK_S, *waits]))

    def _keep_limits(self) -> None:
        outcome, limits, now = self.outcome, self._limits, time.monotonic()
        if outcome.stopped_s is None and limits.stop_signal is not None and self._stop_is_due(now):
            outcome.stopped_s = now
            self.keeper.send(limits.stop_signal)
        if not outcome.stacks and now > self._next_look_s:
            self._next_look_s = now + _TICK_S
            began = self._seen_to_end()
            if began is not None and now > began + limits.max_shutdown_s:
                outcome.stacks = self._stacks()
        deadline = None if limits.timeout_s is None else outcome.started_s + limits.timeout_s
        if deadline is None and outcome.stopped_s is not None:
            deadline = outcome.stopped_s + max(_AFTER_STOP_S, 2 * limits.max_shutdown_s)
        if deadline is not None and now >= deadline:
            outcome.timed_out = True
            outcome.stacks = self._stacks() or outcome.stacks
            self.keeper.end()
            outcome.ended_s = time.monotonic()

    def _seen_to_end(self) -> float | None:
        """Return when the shutdown began, without reading all that was recorded each time."""
        if self.outcome.stopped_s is None and not self._new_events.has(b"'atexit'"):
            return None
        return self.shutdown_began_s(self.inside())

    def _stop_is_due(self, now: float) -> bool:
        if self._awaited is not None:
            return self._awaited.is_seen()
        return now >= self.outcome.started_s + (self._limits.stop_after_s or 0.0)

    def _stacks(self) -> str:
        """Have the probe's process write the stacks of its threads, or say what there is."""
        inside = self.inside()
        below = self._members()
        stacks = ""
        for process in below:
            if process.pid == inside.pid:
                file = self._events.with_name(self._events.name + ".stacks")
                offer = inside.offers_stacks
                stacks = ask_for_stacks(process.pid, offer, file, lambda: self.inside().stacks)
        return stacks or "\n".join(f"{process}: state {process.state}" for process in below)

    def _members(self) -> list[Process]:
        """List the program and all that descends from it, as far as that can be known."""
        below = descendants(self.keeper.keeper_pid)
        if below or self.keeper.returncode is not None:
            return below
        program = read_process(self.keeper.pid)
        return [] if program is None or program.state in "ZX" else [program]

    def _all_gone(self) -> bool:
        """Say whether nothing is left of the run; after some patience, note what is."""
        left, open_pipes = descendants(self.keeper.keeper_pid), bool(self._streams)
        # What forks and goes, over and over, is hardly ever seen; the keeper knows that it is.
        alone = self.keeper.is_alone and not left
        if alone and not open_pipes:
            return True
        now = time.monotonic()
        self._last_left = left or self._last_left
        self._last_seen_s = max(self._last_seen_s, self.outcome.ended_s) if alone else now
        # The end of what a process wrote is there to be read only after it is gone.
        waited = now - (self._last_seen_s if alone else self.outcome.ended_s)
        ending = any(process.is_ending for process in left)
        with_helpers = any(process.is_helper() for process in left)
        patience = _PATIENCE_WITH_HELPERS_S if with_helpers or ending else _PATIENCE_S
        if waited < patience and (ending or not self._in_a_hurry):
            return False
        self.outcome.left_over = [] if alone else self._last_left
        self.outcome.is_left, self.outcome.holds_output = not alone, open_pipes
        if left:
            held = memory_of_processes()
            self.outcome.held_gpu_bytes = {p.pid: held[p.pid] for p in left if held.get(p.pid)}
        return True


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _make_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, _SET_PIPE_SIZE, _ROOM_OF_PIPE)
    except OSError:
        pass  # Not Linux, or too many of them: smaller portions.
    return reader, writer


def _make_terminal() -> tuple[int, int]:
    """Make a terminal like the one that stdout is, which hands on each byte as it is."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    try:
        size = fcntl.ioctl(1, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    except OSError:
        pass  # One that has no size.
    return reader, writer
