"""Run a program to its end and beyond: until all that it started is gone, or was ended."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from clean_exit.gpu import memory_of_processes
from clean_exit.keeping import KeeperProcess
from clean_exit.processes import Process, descendants, send_signal
from clean_exit.record import Record, read_record
from clean_exit.stderr import StderrText
from clean_exit.streams import Awaited, Copy, Pump

_TICK_S = 0.25  # how often the clock is looked at while the program runs
_TICK_AFTER_S = 0.02  # and when it has ended
# A process that outlives the program may sleep so long, and work so long, before it is left over.
_IDLE_S = 2.0
_WORK_S = 15.0
_HELPERS = ("resource_tracker", "semaphore_tracker", "multiprocessing.forkserver")
_AFTER_STOP_S = 60.0  # for a program that was asked to stop, unless a timeout says otherwise
_FOR_STACKS_S = 1.0
_ROOM_OF_PIPE = 1 << 20
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)
_END_EARLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STACKS_SIGNAL = 62  # as in the probe


@dataclass(frozen=True)
class Limits:
    """When to stop a program, in seconds; None for never. See `clean_exit.check`.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is invalid, or they contradict each other.
    """

    timeout_s: float | None = None
    max_shutdown_s: float = 5.0
    stop_signal: int | None = None
    stop_after_s: float | None = None
    stop_when: str | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_shutdown_s", "stop_after_s"):
            value = getattr(self, name)
            if value is None and name != "max_shutdown_s":
                continue
            try:
                is_right = value >= 0 if name == "stop_after_s" else value > 0  # Not of a NaN.
            except TypeError:
                raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None
            if not is_right:
                least = "0 seconds or more" if name == "stop_after_s" else "more than 0 seconds"
                raise ValueError(f"{name} must be {least}, not {value!r}")
        is_number = isinstance(self.stop_signal, int) and not isinstance(self.stop_signal, bool)
        if self.stop_signal is not None and not is_number:
            raise TypeError(
                f"stop_signal must be a signal's number, such as signal.SIGTERM, not "
                f"{self.stop_signal!r}"
            )
        if self.stop_signal is not None and self.stop_signal not in signal.valid_signals():
            raise ValueError(
                f"stop_signal must be a signal's number, such as signal.SIGTERM, not "
                f"{self.stop_signal!r}"
            )
        when = [n for n in ("stop_after_s", "stop_when") if getattr(self, n) is not None]
        if len(when) > 1:
            raise ValueError("stop_after_s and stop_when exclude each other")
        if when and self.stop_signal is None:
            raise ValueError(f"{when[0]} needs stop_signal, the signal to send")
        if self.stop_signal is not None and not when:
            raise ValueError(
                "stop_signal needs stop_after_s or stop_when, which say when to send it"
            )
        if self.stop_when is not None:
            compile_pattern(self.stop_when)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        TypeError: It is not a string.
        ValueError: It is invalid.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a regular expression must be a string, not {pattern!r}")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


@dataclass
class Outcome:
    """What was observed of a run. Times are on the monotonic clock.

    Attributes:
        limits: When it was to be stopped.
        started_s: When it was started.
        pid: The program's process id.
        returncode: As `subprocess` has it.
        ended_s: When the program ended.
        stopped_s: When it was sent the stop signal; None if it was not.
        timed_out: Whether it had to be killed.
        stacks: The stacks of its threads when it was slow or hung, or its processes.
        is_left: Whether something outlived it.
        left_over: Processes that did; empty if they were too quick to be seen.
        holds_output: Whether its output was still open somewhere.
        held_gpu_bytes: GPU memory of processes that outlived it, by process id.
        record: What was seen from inside.
    """

    limits: Limits
    started_s: float
    pid: int = 0
    returncode: int = 0
    ended_s: float = 0.0
    stopped_s: float | None = None
    timed_out: bool = False
    stacks: str = ""
    is_left: bool = False
    left_over: list[str] = field(default_factory=list)
    holds_output: bool = False
    held_gpu_bytes: dict[int, int] = field(default_factory=dict)
    record: Record = field(default_factory=Record)

    @property
    def own_record(self) -> Record | None:
        """The record, if it is of the program itself and not of a Python further down."""
        return self.record if self.record.pid == self.pid else None

    @property
    def shutdown_began_s(self) -> float | None:
        """When the program began to end: asked to, or when its threads had been joined.

        Only the program's own end counts: that of a Python below it is a part of its work.
        """
        if self.stopped_s is not None:
            return self.stopped_s
        return self.own_record.atexit_s if self.own_record else None

    @property
    def shutdown_s(self) -> float | None:
        """From there to its end."""
        began = self.shutdown_began_s
        return None if began is None else max(0.0, self.ended_s - began)

    @property
    def threads_s(self) -> float | None:
        """How long its threads went on after its main module; part of its work, like that."""
        record = self.own_record
        if self.stopped_s is not None or record is None:
            return None
        if record.main_ended_s is None or record.atexit_s is None:
            return None
        return max(0.0, record.atexit_s - record.main_ended_s)


class Run:
    """One run of a program.

    Args:
        command: The program and its arguments.
        environment: Its environment.
        folder: Where the probe writes its record to; None without a probe.
        limits: When to stop it.
        cwd: The folder that it starts in.
        stdin: As for `subprocess`; None for this process's own.
        copy_stdout: Whether stdout is read here; else the program has this process's own.
        echo: Whether what is read here is passed through as well.
        mask: The signals that it starts with blocked; None for those of this thread.
        inherit: Whether it also gets this process's inheritable files.

    Raises:
        OSError: It could not be started.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        *,
        folder: str | None,
        limits: Limits,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = None,
        copy_stdout: bool = True,
        echo: bool = False,
        mask: Collection[int] | None = None,
        inherit: bool = False,
    ) -> None:
        self._folder, self._limits = folder, limits
        self.text: StderrText = StderrText()
        self.stdout: Copy = Copy()
        self.stderr: Copy = Copy()
        self.forwarded: set[int] = set()
        self._is_hurried = False
        self._awaited: list[Awaited] = []
        self._pumps: list[Pump] = []
        self._busy_s = self._next_look_s = 0.0
        self._last_left: list[Process] = []
        self._last_busy = -1
        self._record_read = 0  # bytes of the record, in search of the beginning of the end
        self._is_ending = False
        ours: list[int] = []
        try:
            stdout: int | None = None
            if copy_stdout or limits.stop_when is not None:
                reader, stdout = _make_pipe()
                ours.append(stdout)
                copies = [self.stdout.feed] if copy_stdout else []
                self._add_pump(reader, 1 if echo or not copy_stdout else None, copies)
            reader, stderr = _make_pipe()
            ours.append(stderr)
            self._add_pump(reader, 2 if echo else None, [self.text.feed, self.stderr.feed])
            self.outcome: Outcome = Outcome(limits, time.monotonic())
            self.keeper: KeeperProcess = KeeperProcess(
                command,
                environment,
                files=(stdin, stdout, stderr),
                folder=folder or "",
                cwd=cwd,
                mask=mask,
                inherit=inherit,
                close=ours,
            )
            self.outcome.pid = self.keeper.pid
        finally:
            for file in ours:
                os.close(file)
            for pump in self._pumps:  # Without a program they come to their end at once.
                pump.start()

    def _add_pump(self, reader: int, sink: int | None, watchers: list[Any]) -> None:
        if self._limits.stop_when is not None:  # One for each stream: lines are of one.
            self._awaited.append(Awaited(compile_pattern(self._limits.stop_when)))
            watchers = [*watchers, self._awaited[-1].feed]
        self._pumps.append(Pump(reader, sink, watchers))

    def finish(self) -> Outcome:
        """Wait until everything is over, end what is left, and say what was observed.

        Interrupted, it leaves nothing of the run behind. `close` is to be called afterwards.
        """
        try:
            while not self._is_over():
                self.keeper.hear(self._pause_s())
        finally:
            self.keeper.end()
        for pump in self._pumps:
            pump.join(_IDLE_S)
            # Somebody reads it later, unless this process is told to end.
            while pump.is_alive() and pump.is_writing and not self._is_hurried:
                pump.join(_TICK_S)
        self.text.close()
        # Another user's, which could not be ended, has none.
        code = self.keeper.returncode
        self.outcome.returncode = -signal.SIGKILL if code is None else code
        self.outcome.ended_s = self.keeper.ended_s or time.monotonic()
        self.outcome.record = self._read_record()
        return self.outcome

    def close(self) -> None:
        """End the keeper, which removes the folder."""
        self.keeper.close()

    def receive_signal(self, number: int, is_for_group: bool) -> bool:
        """Pass on a signal that this process got, from any thread; False if the program ended."""
        if number in _END_EARLY and signal.getsignal(number) is not signal.SIG_IGN:
            self._is_hurried = True
        if self.keeper.returncode is not None:
            return False
        self.forwarded.add(number)
        return is_for_group or self.keeper.send(number)

    def _read_record(self) -> Record:
        """Read what the probe has recorded so far."""
        return read_record(self._folder, self.keeper.pid)

    def _pause_s(self) -> float:
        """Return how long to wait for news, so that the next moment that matters is not missed."""
        if self.keeper.ended_s is not None:
            return _TICK_AFTER_S
        now, limits = time.monotonic(), self._limits
        moments = [limits.timeout_s]
        if self.outcome.stopped_s is None and limits.stop_when is None:
            moments.append(limits.stop_after_s)
        waits = [self.outcome.started_s + m - now for m in moments if m is not None]
        return max(0.0, min([_TICK_S, *waits]))

    def _is_over(self) -> bool:
        """Do what is due now, and say whether the run has come to its end."""
        if self.keeper.ended_s is not None:
            return self._is_all_gone(self.keeper.ended_s)
        outcome, limits, now = self.outcome, self._limits, time.monotonic()
        if outcome.stopped_s is None and limits.stop_signal is not None and self._stop_is_due(now):
            outcome.stopped_s = now
            self.keeper.send(limits.stop_signal)
        if not outcome.stacks and now > self._next_look_s:
            self._next_look_s = now + _TICK_S
            began = self._seen_to_end_s()
            if began is not None and now > began + limits.max_shutdown_s:
                outcome.stacks = self._stacks()
        deadline = None if limits.timeout_s is None else outcome.started_s + limits.timeout_s
        if deadline is None and outcome.stopped_s is not None:
            deadline = outcome.stopped_s + max(_AFTER_STOP_S, 2 * limits.max_shutdown_s)
        if deadline is not None and now >= deadline:
            outcome.timed_out = True
            outcome.stacks = self._stacks() or outcome.stacks
            self.keeper.end()
            return True
        return False

    def _seen_to_end_s(self) -> float | None:
        """Return when the shutdown began; reads only what the record got since the last look."""
        outcome = self.outcome
        if outcome.stopped_s is None and not self._is_ending and self._folder is not None:
            events = Path(self._folder, "events")
            wanted = b"('atexit', %d, " % self.keeper.pid
            try:
                if not events.is_file():  # The program may have put anything there.
                    return None
                with events.open("rb") as file:
                    file.seek(self._record_read)
                    data = file.read(1 << 20)
            except OSError:
                return None
            self._is_ending = wanted in data
            self._record_read += max(0, len(data) - len(wanted))
        if self._is_ending:
            outcome.record = self._read_record()
        return outcome.shutdown_began_s

    def _stop_is_due(self, now: float) -> bool:
        if self._awaited:
            return any(awaited.is_seen() for awaited in self._awaited)
        return now >= self.outcome.started_s + (self._limits.stop_after_s or 0.0)

    def _stacks(self) -> str:
        """Have the probe's process write the stacks of its threads, or say what there is."""
        record, below = self._read_record(), self._below()
        for process in below:
            is_probed = (process.pid, process.ticks) == (record.pid, record.ticks)
            if is_probed and _handles_stacks(process.pid) and send_signal(process, STACKS_SIGNAL):
                stop = time.monotonic() + _FOR_STACKS_S
                stacks = record.stacks
                while time.monotonic() < stop:
                    time.sleep(0.05)
                    now = self._read_record().stacks
                    if now != record.stacks and now == stacks:  # Nothing has followed.
                        return stacks.removeprefix(record.stacks).strip()
                    stacks = now
        return "\n".join(f"{process}: state {process.state}" for process in below)

    def _below(self) -> list[Process]:
        """List the program and all that descends from it, as far as that can be known."""
        return descendants(self.keeper.keeper_pid) or []

    def _is_all_gone(self, ended_s: float) -> bool:
        """Say whether nothing is left of the run; after some patience, note what is."""
        if self.keeper.is_alone and not any(pump.is_alive() for pump in self._pumps):
            return True
        now, left = time.monotonic(), self._below()
        self._last_left = left or self._last_left
        busy = sum(process.busy_ticks for process in left)
        is_ending = any(process.is_ending for process in left)
        # A reader of this process's output that pauses is waited for, as it would be plainly. A
        # process that works, or that the kernel is about to end, waits for the processor.
        is_writing = any(pump.is_writing for pump in self._pumps)
        if self.keeper.is_alone and is_writing and not self._is_hurried:
            ended_s = self._busy_s = now
        elif busy != self._last_busy or is_ending or any(p.state in "RD" for p in left):
            self._busy_s = now
        self._last_busy = busy
        is_patient = is_ending or any(h in p.command() for p in left for h in _HELPERS)
        idle_s = _WORK_S if is_patient else _IDLE_S
        if self._is_hurried and (left or is_writing) and not is_ending:
            idle_s = 0.0
        if now < max(self._busy_s, ended_s) + idle_s and now < ended_s + max(_WORK_S, idle_s):
            return False
        self.outcome.is_left = not self.keeper.is_alone
        self.outcome.holds_output = any(pump.is_alive() for pump in self._pumps)
        if self.outcome.is_left:
            self.outcome.left_over = [str(process) for process in self._last_left]
            held = memory_of_processes()
            self.outcome.held_gpu_bytes = {p.pid: held[p.pid] for p in left if held.get(p.pid)}
        return True


def _handles_stacks(pid: int) -> bool:
    """Say whether a process has a handler for the signal, which would end it otherwise."""
    try:
        for line in Path("/proc", str(pid), "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    except OSError:
        pass  # It has ended.
    return False


def _make_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, _SET_PIPE_SIZE, _ROOM_OF_PIPE)
    except OSError:
        pass  # Not Linux, or too many of them: smaller portions.
    return reader, writer
