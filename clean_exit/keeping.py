"""The checker's side of the keeper: start the program below it, and hear how it fares."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clean_exit.processes import read_process, send_signal

_SCRIPT = Path(__file__).with_name("keeper.py")


class CheckerError(Exception):
    """The checker itself failed in the middle of a run; the program was ended."""


class KeeperLostError(CheckerError):
    """The supervising process was killed; so was the program, but not its children."""


class KeeperProcess:
    """A program below its keeper.

    Args:
        command: The program, searched in PATH, and its arguments.
        environment: All of the program's environment.
        files: What its standard input, output and error are to be, as for `subprocess`.
        folder: What the keeper removes when the run is over; empty for nothing.
        cwd: The folder that the program starts in.
        mask: The signals that it starts with blocked; None for those of this thread.
        inherit: Whether it also gets this process's inheritable files.
        close: Files to close as soon as the keeper has them; the list is emptied. A process that
            another thread forks meanwhile would keep them open.

    Attributes:
        pid: The program's process id.
        keeper_pid: The keeper's: all of the run descends from it.
        returncode: As `subprocess` has it; None while the program runs.
        ended_s: When it ended, on the monotonic clock; None while it runs.
        is_alone: Whether it has ended, and all that descends from it.

    Raises:
        OSError: The program could not be started.
        ValueError: The command or the environment has a null character.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        files: tuple[int | IO[Any] | None, int | None, int],
        folder: str,
        cwd: str | os.PathLike[str] | None,
        mask: Collection[int] | None,
        inherit: bool,
        close: list[int],
    ) -> None:
        self.returncode: int | None = None
        self.ended_s: float | None = None
        self.is_alone: bool = False
        self._is_gone = False
        self._rest = b""
        if mask is None:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(inherit)
            # LC_CTYPE is set by a Python that finds no locale, see PEP 538.
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
            except BaseException:
                self._socket.close()
                raise
        while close:
            os.close(close.pop())
        self.keeper_pid: int = self._process.pid
        try:
            while b"\n" not in self._rest:
                self._receive()
            line, _, self._rest = self._rest.partition(b"\n")
            what, number = line.split()
            if what == b"failed":
                raise OSError(int(number), os.strerror(int(number)), command[0])
            self.pid: int = int(number)
            self._program = read_process(self.pid)
            self._take_in()  # It may have ended already.
        except BaseException:  # Whatever it is, it is raised: the keeper must not outlive it.
            self.close()
            raise

    def _receive(self) -> None:
        try:
            data = self._socket.recv(4096)
        except OSError:
            data = b""
        if not data:
            raise KeeperLostError(
                "the supervising process was killed; what the program started may still run"
            )
        self._rest += data

    def _take_in(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            what, *values = line.split()
            if what == b"ended":
                self.returncode = os.waitstatus_to_exitcode(int(values[0]))
                self.ended_s = float(values[1])
            self._is_gone = self._is_gone or what == b"gone"
            self.is_alone = self.is_alone or what in (b"alone", b"gone")

    def hear(self, timeout_s: float) -> None:
        """Take in what the keeper says; wait for that so many seconds.

        Raises:
            KeeperLostError: It was ended.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(1000 * timeout_s):
            self._receive()
            self._take_in()

    def send(self, number: int) -> bool:
        """Send the program a signal; False if it has ended."""
        if self.returncode is not None:
            return False
        self._say(f"kill {number}")
        return True

    def _say(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            pass  # The keeper is gone; the next `hear` says so.

    def end(self) -> None:
        """End the program and all that descends from it, and wait until it is gone."""
        self._say("end")
        try:
            while not self._is_gone:
                self._receive()
                self._take_in()
        except KeeperLostError:
            if self._program is not None:
                send_signal(self._program, signal.SIGKILL)

    def close(self) -> None:
        """End what is left, and the keeper. Idempotent."""
        try:
            # Not close() alone: a process that was forked meanwhile may have a copy.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The keeper is gone, or this was done before.
        self._socket.close()
        self._process.wait()
