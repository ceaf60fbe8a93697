"""Run a program until it and all processes that it started have ended, or were ended."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:
    raise ImportError("clean-exit needs Linux or macOS; on Windows, run it in WSL") from None

from clean_exit.options import compile_pattern
from clean_exit.probe_record import Record, read_record, read_stacks
from clean_exit.processes import (
    HELPERS,
    Process,
    descendants,
    environment,
    read_process,
    run_delay_ns,
    send_signal,
)
from clean_exit.signals import Sender
from clean_exit.stderr import StderrText
from clean_exit.streams import Pump
from clean_exit.supervisor_client import SupervisorProcess

_TICK_S = 0.05  # between two looks at the run, while the program runs
_TICK_AFTER_S = 0.02  # and after it has ended
# A process that outlives the program may sleep and work for so long before it is a finding.
_IDLE_S = 2.0
_WORK_S = 15.0
# Without a timeout: until a line matches stop_when, and after the stop signal.
PATIENCE_S = 60.0
_STACKS_TIMEOUT_S = 1.0
_END_EARLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STACKS_SIGNAL = 62  # as in the probe


@dataclass(frozen=True)
class Limits:
    """The options of `clean_exit.check` that say when to stop a program.

    Raises:
        TypeError: A time is not a number.
        ValueError: A value is invalid, or does not go with the others.
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
            if not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, got {value!r}")
            if not value > 0:  # False for a NaN.
                raise ValueError(f"{name} must be more than 0 seconds, got {value!r}")
        number = self.stop_signal
        if number is not None and number not in signal.valid_signals():
            message = "stop_signal must be a signal's number, such as signal.SIGTERM"
            raise ValueError(f"{message}, got {number!r}")
        moments = (self.stop_after_s, self.stop_when)
        if moments.count(None) != (2 if number is None else 1):
            raise ValueError("stop_signal needs either stop_after_s or stop_when, and both need it")
        if self.stop_when is not None:
            compile_pattern(self.stop_when)

    @property
    def after_stop_s(self) -> float:
        """The time from the stop signal until the program is killed, if there is no timeout."""
        return max(PATIENCE_S, 2 * self.max_shutdown_s)


@dataclass
class Outcome:
    """The observations of a run. Times are in seconds on the monotonic clock.

    Attributes:
        limits: The options that say when to stop the program.
        started_s: The start of the program.
        pid: The program's process id.
        returncode: As in `subprocess`.
        ended_s: The end of the program.
        stopped_s: The time of the stop signal; None if it was not sent.
        timed_out: Whether the program had to be killed.
        stacks: The stacks of its processes when it hung, or was slow after the stop signal.
        is_left: Whether processes outlived it.
        remaining: Those processes; empty if they were too short-lived to be listed.
        tests: The tests that have started them, in the same order; "" if unknown.
        holds_output: Whether a process still had the program's output open.
        delay_s: The part of its shutdown in which the program was stopped, or was ready to run and
            had to wait for a processor.
        record: The observations of the probes.
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
    remaining: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    holds_output: bool = False
    delay_s: float = 0.0
    record: Record = field(default_factory=Record)

    @property
    def own_record(self) -> Record | None:
        """The record, if it is about the program itself and not about one of its children."""
        return self.record if self.record.pid == self.pid else None

    @property
    def shutdown_s(self) -> float | None:
        """The duration of the shutdown in seconds, without the time that the system took.

        The shutdown of a child process is a part of the program's work.
        """
        began = self.began_s
        return None if began is None else max(0.0, self.ended_s - began - self.delay_s)

    @property
    def began_s(self) -> float | None:
        """When the shutdown began: at the stop signal, or when threads were joined."""
        own = self.own_record
        return own.atexit_s if self.stopped_s is None and own else self.stopped_s


class Run:
    """One run of a program.

    Args:
        command: The program and its arguments.
        environment: The program's environment.
        folder: The folder of the record.
        limits: The options that say when to stop the program.
        cwd: The current folder of the program.
        stdin: As for `subprocess`; None for this process's stdin.
        copy_stdout: Whether to read stdout; if not, the program has this process's stdout.
        echo: Whether to pass the output through as well.

    Raises:
        OSError: The program could not be started.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        *,
        folder: str,
        limits: Limits,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = None,
        copy_stdout: bool = True,
        echo: bool = False,
    ) -> None:
        self._folder, self._limits = folder, limits
        self.text: StderrText = StderrText()
        self.forwarded: set[int] = set()
        self._is_hurried = False
        self._pumps: list[Pump] = []
        self._busy_s = 0.0
        self._delay_ns = 0  # at the stop signal
        self._asleep: deque[list[float]] = deque(maxlen=1000)  # start and end
        self._asleep_at: int | None = None  # the processor time used, at the last look
        self._last_left: list[Process] = []
        self._last_busy = -1
        ours: list[int] = []
        pattern = None if limits.stop_when is None else compile_pattern(limits.stop_when)
        try:
            stdout: int | None = None
            if copy_stdout or limits.stop_when is not None:
                reader, stdout = _make_pipe()
                ours.append(stdout)
                sink = 1 if echo or not copy_stdout else None
                self._pumps.append(Pump(reader, sink, pattern))
            reader, stderr = _make_pipe()
            ours.append(stderr)
            self._pumps.append(Pump(reader, 2 if echo else None, pattern, self.text.feed))
            self.outcome: Outcome = Outcome(limits, time.monotonic())
            self.supervisor: SupervisorProcess = SupervisorProcess(
                command, environment, files=(stdin, stdout, stderr), folder=folder, cwd=cwd
            )
            self.outcome.pid = self.supervisor.pid
        finally:
            for file in ours:
                os.close(file)
            for pump in self._pumps:  # They end at once if the program was not started.
                pump.start()

    @property
    def stdout(self) -> str:
        """The end of the program's stdout, if it is read."""
        return self._pumps[0].text() if len(self._pumps) > 1 else ""

    @property
    def stderr(self) -> str:
        """The end of the program's stderr."""
        return self._pumps[-1].text()

    def wait(self) -> Outcome:
        """Wait until the program has ended, and its other processes had time to end."""
        while not self._is_over():
            self.supervisor.receive(_TICK_S if self.supervisor.ended_s is None else _TICK_AFTER_S)
        return self.outcome

    def finish(self, *, leave: bool = False) -> None:
        """Read the rest of the output and of the record.

        Args:
            leave: Whether the remaining processes go on; if not, they are ended.
        """
        self.supervisor.end(leave=leave)
        for pump in self._pumps:
            pump.join(_IDLE_S)
            # Wait for a reader that pauses, unless a signal told this process to end.
            while pump.is_alive() and pump.is_writing and not self._is_hurried:
                pump.join(_TICK_S)
        self.text.close()
        # There is no code if the program belongs to another user and could not be ended.
        code = self.supervisor.returncode
        self.outcome.returncode = -signal.SIGKILL if code is None else code
        self.outcome.ended_s = self.supervisor.ended_s or time.monotonic()
        limit_s = self._limits.max_shutdown_s
        self.outcome.record = read_record(self._folder, self.supervisor.pid, limit_s)
        self.outcome.delay_s = self._delay_s()

    def _delay_s(self) -> float:
        outcome, supervisor = self.outcome, self.supervisor
        began_s, before_ns = outcome.began_s, self._delay_ns
        if began_s is None:
            return 0.0
        if outcome.stopped_s is None:
            before_ns = outcome.record.atexit_delay_ns

        def shutdown_part(times: Iterable[list[float]]) -> float:
            parts = (min(end, outcome.ended_s) - max(start, began_s) for start, end in times)
            return sum(max(0.0, part) for part in parts)

        # Linux 6.12 and later may count sleep as delay on a busy machine.
        awake_s = outcome.ended_s - began_s - shutdown_part(self._asleep)
        delay_s = min((supervisor.delay_ns - before_ns) / 1e9, awake_s)
        return max(0.0, delay_s) + shutdown_part(supervisor.stops)

    def forward_signal(self, number: int, sender: Sender) -> bool:
        """Pass on a signal of this process unless its group has it; callable from any thread.

        Returns:
            Whether the program has it; False if the program has ended.
        """
        if number in _END_EARLY and signal.getsignal(number) is not signal.SIG_IGN:
            self._is_hurried = True
        self.forwarded.add(number)
        return self.supervisor.send_signal(number, sender)

    def _is_over(self) -> bool:
        """Enforce the limits; return whether the run is over."""
        if self.supervisor.ended_s is not None:
            return self._is_all_gone(self.supervisor.ended_s)
        outcome, limits, now = self.outcome, self._limits, time.monotonic()
        self._note_sleep(now)
        is_due = now >= outcome.started_s + (limits.stop_after_s or math.inf)
        is_due |= any(pump.is_matched for pump in self._pumps)
        if is_due and outcome.stopped_s is None and limits.stop_signal is not None:
            outcome.stopped_s, self._delay_ns = now, run_delay_ns(self.supervisor.pid)
            self.supervisor.send_signal(limits.stop_signal)
        stopped_s = outcome.stopped_s
        if stopped_s is not None and not outcome.stacks and now > stopped_s + limits.max_shutdown_s:
            outcome.stacks = self._stacks()
        deadline = None if limits.timeout_s is None else outcome.started_s + limits.timeout_s
        if deadline is None and stopped_s is not None:
            deadline = stopped_s + limits.after_stop_s
        elif deadline is None and limits.stop_when is not None:
            deadline = outcome.started_s + PATIENCE_S
        if deadline is not None and now >= deadline:
            outcome.timed_out = True
            outcome.stacks = self._stacks() or outcome.stacks
            self.supervisor.end()
            return True
        return False

    def _note_sleep(self, now: float) -> None:
        program, before = read_process(self.supervisor.pid), self._asleep_at
        is_asleep = program is not None and program.state in "SD"
        self._asleep_at = program.busy_ticks if program is not None and is_asleep else None
        if self._asleep_at is not None and self._asleep_at == before:
            self._asleep[-1][1] = now
        elif is_asleep:
            self._asleep.append([now, now])

    def _stacks(self) -> str:
        """Return the state of all processes, with the stacks of those that have a probe."""
        below = self._below()
        before = {p.pid: read_stacks(self._folder, p.pid) for p in below if _handles_stacks(p.pid)}
        for process in below:
            if process.pid in before:
                send_signal(process, STACKS_SIGNAL)
        stop, stacks, last = time.monotonic() + _STACKS_TIMEOUT_S, before, None
        # Until all have written something, and no more lines have followed.
        while time.monotonic() < stop and (stacks != last or any(
            stacks[pid] == before[pid] for pid in before
        )):  # fmt: skip
            time.sleep(0.05)
            last, stacks = stacks, {pid: read_stacks(self._folder, pid) for pid in before}
        lines = []
        for process in below:
            lines.append(f"{process}: state {process.state}")
            if new := stacks.get(process.pid, "").removeprefix(before.get(process.pid, "")):
                lines.append(new.strip())
        return "\n".join(lines)

    def _below(self) -> list[Process]:
        """List the program and its descendants; empty without /proc."""
        return descendants(self.supervisor.supervisor_pid) or []

    def _is_all_gone(self, ended_s: float) -> bool:
        """Whether all processes have ended, or the remaining ones had enough time."""
        if self.supervisor.is_alone and not any(pump.is_alive() for pump in self._pumps):
            return True
        now, left = time.monotonic(), self._below()
        self._last_left = left or self._last_left
        busy = sum(process.busy_ticks for process in left)
        is_ending = any(process.is_ending for process in left)
        # Without the checker, a program would wait for a reader of its output that pauses. A
        # process that works, or that the kernel is about to end, only waits for the processor.
        is_writing = any(pump.is_writing for pump in self._pumps)
        if self.supervisor.is_alone and is_writing and not self._is_hurried:
            ended_s = self._busy_s = now
        elif busy != self._last_busy or is_ending or any(p.state in "RD" for p in left):
            self._busy_s = now
        self._last_busy = busy
        is_patient = is_ending or any(h in p.command() for p in left for h in HELPERS)
        idle_s = _WORK_S if is_patient else _IDLE_S
        if self._is_hurried and (left or is_writing) and not is_ending:
            idle_s = 0.0
        if now < max(self._busy_s, ended_s) + idle_s and now < ended_s + max(_WORK_S, idle_s):
            return False
        self.outcome.is_left = not self.supervisor.is_alone
        self.outcome.holds_output = any(pump.is_alive() for pump in self._pumps)
        if self.outcome.is_left:
            self.outcome.remaining = [str(process) for process in self._last_left]
            variables = (environment(process.pid) for process in self._last_left)
            tests = ((v.get("PYTEST_CURRENT_TEST"), v.get("CLEAN_EXIT_TEST")) for v in variables)
            self.outcome.tests = [
                test.rpartition(" (")[0] if test and test != outer else "" for test, outer in tests
            ]
        return True


def _handles_stacks(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    try:
        for line in Path("/proc", str(pid), "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    except OSError:
        pass  # The process has ended.
    return False


def _make_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        # A large pipe, in which a program can write much at once.
        fcntl.fcntl(writer, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)
    except OSError:
        pass  # Not Linux, or too many large pipes: the usual size will do.
    return reader, writer
