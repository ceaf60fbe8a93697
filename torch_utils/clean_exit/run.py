"""Run a program to its end and beyond: until all that it started is gone, or was ended."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .events import Inside, read_events
from .gpu import memory_of_processes
from .processes import (
    Process,
    end,
    find_process,
    processes_of_run,
    reap_adopted,
)
from .stderr_text import StderrText
from .streams import Awaited, Copy, Stream

_STACKS_SIGNAL = 62  # as in the probe
_TICK_S = 0.25  # how often the clock is looked at while the program runs
_TICK_AFTER_S = 0.02  # and when it has ended
_PATIENCE_S = 2.0  # for what outlives the program
_PATIENCE_WITH_HELPERS_S = 15.0  # for Python's own helpers, which have to be scheduled first
_AFTER_STOP_S = 60.0  # for a program that was asked to stop, unless a timeout says otherwise


@dataclass(frozen=True)
class Limits:
    """When to stop a program, in seconds; None for never."""

    timeout_s: float | None = None
    max_shutdown_s: float = 5.0
    stop_signal: int | None = None
    stop_after_s: float | None = None
    stop_when: re.Pattern[str] | None = None


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
    held_gpu_bytes: dict[int, int] = field(default_factory=dict)
    holds_output: bool = False


class Run:
    """One run of a program.

    Args:
        command: What to start.
        environment: Its environment, which carries the token.
        token: By which its processes are recognised.
        events: Where the probe writes to.
        limits: When to stop it.
        cwd: The folder that it starts in.
        stdin: As for `subprocess`; None for this process's own.
        copy_stdout: Whether stdout is read here; else the program has this process's own.
        echo: Whether what is read here is passed through as well.
        adopted_by: This process's id, if it is a subreaper.

    Raises:
        OSError: It could not be started.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        *,
        token: str,
        events: Path,
        limits: Limits,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = None,
        copy_stdout: bool = True,
        echo: bool = False,
        adopted_by: int | None = None,
    ) -> None:
        self._token, self._events, self._limits = token, events, limits
        self._adopted_by = adopted_by
        self.text = StderrText()
        self.stdout, self.stderr = Copy(), Copy()
        self._awaited = Awaited(limits.stop_when) if limits.stop_when is not None else None
        self.forwarded: set[int] = set()
        self._next_look_s = 0.0
        self.outcome = Outcome(started_s=time.monotonic())
        read_stdout = copy_stdout or self._awaited is not None
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE if read_stdout else None,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        awaited = [self._awaited.feed] if self._awaited is not None else []
        self._streams: list[Stream] = []
        if self.process.stdout is not None:
            copied = [self.stdout.feed] if copy_stdout else []
            sink = 1 if echo or not copy_stdout else None
            file = self.process.stdout.fileno()
            self._streams.append(Stream(file, sink, [*copied, *awaited]))
        assert self.process.stderr is not None
        watchers = [self.text.feed, self.stderr.feed, *awaited]
        self._streams.append(Stream(self.process.stderr.fileno(), 2 if echo else None, watchers))

    def finish(self) -> Outcome:
        """Wait until everything is over, end what is left, and say what was observed."""
        try:
            self._watch()
        except BaseException:  # The checker is interrupted: nothing of the run may stay behind.
            end(self._members())
            raise
        finally:
            end(self.outcome.left_over)
            self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
        self.text.close()
        self.outcome.returncode = self.process.returncode
        return self.outcome

    def forward(self, number: int) -> None:
        """Pass on a signal that this process got."""
        self.forwarded.add(number)
        self.process.send_signal(number)

    def inside(self) -> Inside:
        """Read what the probe has recorded so far."""
        return read_events(self._events, self.process.pid)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream.file, selectors.EVENT_READ, stream)
            handle = _exit_handle(self.process.pid)
            if handle is not None:
                selector.register(handle, selectors.EVENT_READ, None)
            try:
                while not self._is_over(selector, handle):
                    pass
            finally:
                if handle is not None:
                    os.close(handle)

    def _is_over(self, selector: selectors.BaseSelector, handle: int | None) -> bool:
        """Do what is due now, and say whether the run has come to its end."""
        running = not self.outcome.ended_s
        pause = _TICK_S if running and handle is not None else _TICK_AFTER_S
        for key, _ in selector.select(self._until_next(pause) if running else pause):
            if key.data is not None and not key.data.pump():
                selector.unregister(key.fd)
        if running and self.process.poll() is not None:
            self.outcome.ended_s = time.monotonic()
            if handle is not None:
                selector.unregister(handle)
            running = False
        if running:
            self._keep_limits()
            return False
        open_pipes = bool(selector.get_map())
        return self._all_gone(open_pipes)

    def _until_next(self, pause: float) -> float:
        """Shorten a pause so that the next moment that matters is not missed."""
        now, limits = time.monotonic(), self._limits
        moments = [limits.timeout_s]
        if self.outcome.stopped_s is None and limits.stop_when is None:
            moments.append(limits.stop_after_s)
        waits = [self.outcome.started_s + m - now for m in moments if m is not None]
        return max(0.0, min([pause, *waits]))

    def _keep_limits(self) -> None:
        outcome, limits, now = self.outcome, self._limits, time.monotonic()
        if outcome.stopped_s is None and limits.stop_signal is not None and self._stop_is_due(now):
            outcome.stopped_s = now
            self.process.send_signal(limits.stop_signal)
        if not outcome.stacks and now > self._next_look_s:
            self._next_look_s = now + _TICK_S
            began = outcome.stopped_s or self.inside().main_ended_s
            if began is not None and now > began + limits.max_shutdown_s:
                outcome.stacks = self._ask_for_stacks()
        deadline = None if limits.timeout_s is None else outcome.started_s + limits.timeout_s
        if deadline is None and outcome.stopped_s is not None:
            deadline = outcome.stopped_s + max(_AFTER_STOP_S, 2 * limits.max_shutdown_s)
        if deadline is not None and now >= deadline:
            outcome.timed_out = True
            outcome.stacks = self._ask_for_stacks() or outcome.stacks
            end(self._members())

    def _stop_is_due(self, now: float) -> bool:
        if self._awaited is not None:
            return self._awaited.is_seen()
        return now >= self.outcome.started_s + (self._limits.stop_after_s or 0.0)

    def _ask_for_stacks(self) -> str:
        """Have the probe's process write the stacks of its threads, and read them."""
        before = self.inside()
        if before.pid is None:
            return _describe_waiting(self._members())
        try:
            os.kill(before.pid, _STACKS_SIGNAL)
        except OSError:
            return ""
        stacks, stop = "", time.monotonic() + 1.0
        while time.monotonic() < stop:
            time.sleep(0.05)
            now = self.inside().stacks[len(before.stacks) :]
            if now and now == stacks:
                break
            stacks = now
        return stacks.strip()

    def _members(self) -> list[Process]:
        own = find_process(self.process.pid)
        others = processes_of_run(self._token, self.process.pid, self._adopted_by)
        return others if own is None else [own, *others]

    def _all_gone(self, open_pipes: bool) -> bool:
        """Say whether nothing is left of the run; after some patience, note what is."""
        left = processes_of_run(self._token, self.process.pid, self._adopted_by)
        if self._adopted_by is not None:
            reap_adopted(left)
        if not left and not open_pipes:
            return True
        waited = time.monotonic() - self.outcome.ended_s
        with_helpers = any(process.is_helper() for process in left)
        if waited < (_PATIENCE_WITH_HELPERS_S if with_helpers else _PATIENCE_S):
            return False
        self.outcome.left_over = left
        self.outcome.holds_output = open_pipes
        if left:
            held = memory_of_processes()
            self.outcome.held_gpu_bytes = {p.pid: held[p.pid] for p in left if held.get(p.pid)}
        return True


def _exit_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # An old kernel, or not Linux: the clock has to do.
        return None


def _describe_waiting(processes: list[Process]) -> str:
    return "\n".join(f"{process}: state {process.state}" for process in processes)
