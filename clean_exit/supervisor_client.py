"""The checker's side of the supervisor: start it with the program, and exchange lines with it."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clean_exit.processes import Process, read_process, send_signal
from clean_exit.signals import ForwardedSignals, Sender

_SCRIPT = Path(__file__).with_name("supervisor.py")


class CheckerError(Exception):
    """The checker failed during a run, and ended the program."""


class SupervisorProcess:
    """A supervisor process with its program.

    Args:
        command: The program, searched in PATH, and its arguments.
        environment: The complete environment of the program.
        files: The program's standard input, output and error, as for `subprocess`.
        folder: The folder that the supervisor removes after the run.
        cwd: The current folder of the program.

    Attributes:
        pid: The program's process id.
        supervisor_pid: The supervisor's process id; all processes of the run descend from it.
        returncode: As in `subprocess`; None while the program runs.
        ended_s: The end on the monotonic clock, in seconds; None while the program runs.
        delay_ns: How long the program had to wait for a processor until then, in nanoseconds.
        stops: When it was stopped and when it was continued or ended, on the monotonic clock.
        is_blind: Whether the system refuses to tell the supervisor of orphaned processes.
        is_alone: Whether the program and all its descendants have ended.

    Raises:
        OSError: The program could not be started.
        ValueError: The command or the environment contains a null character.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        files: tuple[int | IO[Any] | None, int | None, int],
        folder: str,
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        self.pid: int = 0
        self.returncode: int | None = None
        self.ended_s: float | None = None
        self.delay_ns: int = 0
        self.stops: list[list[float]] = []
        self.is_blind: bool = False
        self.is_alone: bool = False
        self._is_gone = False
        self._program: Process | None = None
        self._rest = b""
        self._name = command[0]
        # The program of the command has its signals blocked as before, and inherits its files.
        signals = ForwardedSignals.active
        inherit = signals is not None
        mask = signals.mask if signals else signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(inherit)
            # Python sets LC_CTYPE if there is no locale (PEP 538).
            unset = "" if "LC_CTYPE" in environment else "LC_CTYPE"
            arguments = [theirs.fileno(), ",".join(str(int(n)) for n in mask), folder, unset]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _SCRIPT, *map(str, arguments), *command],
                    env=environment,
                    cwd=cwd,
                    stdin=files[0],
                    stdout=files[1],
                    stderr=files[2],
                    close_fds=not inherit,
                    pass_fds=() if inherit else [theirs.fileno()],
                )
            except BaseException:  # Also after an interrupt, nothing else closes it.
                self._socket.close()
                raise
        self.supervisor_pid: int = self._process.pid
        try:
            while not self.pid:
                self._receive()
            self._program = read_process(self.pid)
        except BaseException:  # Raised again: the supervisor must not outlive a failure.
            self.close()
            raise

    def _receive(self) -> None:
        try:
            data = self._socket.recv(4096)
        except OSError:
            data = b""
        if not data:
            raise CheckerError(
                "the supervising process was killed; processes of the program may still run"
            )
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, *values = line.split()
            if what == b"failed":
                number = int(values[0])
                raise OSError(number, os.strerror(number), self._name)
            if what == b"started":
                self.pid = int(values[0])
            elif what == b"stopped":
                self.stops.append([float(values[0]), math.inf])
            elif what == b"continued" and self.stops:
                self.stops[-1][1] = float(values[0])
            elif what == b"ended":
                self.returncode = os.waitstatus_to_exitcode(int(values[0]))
                self.ended_s, self.delay_ns = float(values[1]), int(values[2])
            self.is_blind = self.is_blind or what == b"blind"
            self._is_gone = self._is_gone or what == b"gone"
            self.is_alone = self.is_alone or what in (b"alone", b"gone")

    def receive(self, timeout_s: float) -> None:
        """Receive what the supervisor sends, waiting at most `timeout_s` seconds for it.

        Raises:
            CheckerError: The supervisor was killed.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(1000 * timeout_s):
            self._receive()

    def send_signal(self, number: int, sender: Sender | None = None) -> bool:
        """Send the program a signal; return False if the program has ended.

        Args:
            number: The signal.
            sender: Who has sent it to this process; None if it is this process's own. What
                the sender has sent to the whole process group is not passed on.
        """
        if self.returncode is not None:
            return False
        self._send(" ".join(map(str, ("kill", int(number), *(sender or ())))))
        return True

    def _send(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            pass  # The supervisor was killed; the next `receive` raises.

    def end(self, *, leave: bool = False) -> None:
        """End the program and its descendants, and wait until they have ended.

        Args:
            leave: Whether they go on without a supervisor instead.
        """
        self._send("leave" if leave else "end")
        try:
            while not self._is_gone:
                self._receive()
        except CheckerError:
            pass  # close() ends the program.

    def close(self) -> None:
        """End the remaining processes and the supervisor. May be called again."""
        try:
            # close() would not reach the supervisor if a forked process has a copy of the socket.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The supervisor was killed, or this is the second call.
        self._socket.close()
        if self._process.wait() < 0 and self._program is not None and self.returncode is None:
            send_signal(self._program, signal.SIGKILL)  # The supervisor was killed.
