"""The checker's side of the keeper: start the program below it, and hear how it fares."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_SCRIPT = Path(__file__).with_name("keeper.py")


class Keeper:
    """A program below its keeper.

    Args:
        command: What to start, found as execvp(3) finds it.
        environment: All of the program's environment.
        files: What its files 0, 1 and 2 are to be; one that is missing is closed.
        cwd: The folder that it starts in.
        inherit: Whether it also gets this process's inheritable files.
        mask: The signals that it starts with blocked; None for those of this thread.
        follows: Whether this process stops when the program does, and is to go on with it.

    Raises:
        OSError: The program could not be started.
        ValueError: The command or the environment has what no program can be given.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        files: Mapping[int, int],
        cwd: str | os.PathLike[str] | None = None,
        inherit: bool = False,
        mask: Collection[int] | None = None,
        follows: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.had_children: bool | None = None  # whether the program had any; None: not known
        self.is_alone = False  # whether it has ended, and all that descends from it
        self.stopped: int | None = None
        self.for_parent: list[tuple[int, int]] = []  # signals that it sent there, with the sender
        self._rest = b""
        self._gone = False
        _refuse_what_cannot_be_passed(command, environment)
        if mask is None:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        ignored = [n for n in (signal.SIGCHLD,) if signal.getsignal(n) is signal.SIG_IGN]
        start: dict[str, object] = {
            "command": [os.fsencode(word) for word in command],
            "environment": {os.fsencode(k): os.fsencode(v) for k, v in environment.items()},
            "cwd": None if cwd is None else os.fsencode(cwd),
            "files": sorted(files),
            "mask": [int(number) for number in mask],
            "ignored": [int(number) for number in ignored],
            "follows": follows,
        }
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                # The socket travels as standard input, and the files through it: so nothing has
                # to be made inheritable, which programs started meanwhile would inherit.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SCRIPT)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    close_fds=not inherit,
                )
            self._begin(start, [files[number] for number in sorted(files)])
            self.pid = self._hear_of_start(command[0], cwd)
            self._take_in()  # It may have ended already, and its end come with its start.
        except BaseException:  # Whatever it is, it is raised: the keeper must not outlive it.
            self.close()
            raise

    @property
    def keeper_pid(self) -> int:
        """The keeper's own process id: all of the run descends from it."""
        pid: int = self._process.pid
        return pid

    def fileno(self) -> int:
        """Return what becomes readable when there is something to hear."""
        return self._socket.fileno()

    def _begin(self, start: dict[str, object], files: list[int]) -> None:
        data = marshal.dumps(start)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
        self._socket.sendmsg([len(data).to_bytes(4, "big")], ancillary)
        self._socket.sendall(data)

    def _hear_of_start(self, name: str, cwd: str | os.PathLike[str] | None) -> int:
        while (line := self._next_line()) is None:
            self._receive()
        what, _, number = line.partition(" ")
        if what == "failed":
            if cwd is not None and not (Path(cwd).is_dir() and os.access(cwd, os.X_OK)):
                name = os.fspath(cwd)  # It did not get as far as the program.
            raise OSError(int(number), os.strerror(int(number)), name)
        return int(number)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(4096)
        except InterruptedError:
            return
        except OSError:
            data = b""
        if not data:
            raise KeeperLostError("the keeper of the program was ended; nothing is known of it")
        self._rest += data

    def _next_line(self) -> str | None:
        line, end, rest = self._rest.partition(b"\n")
        if not end:
            return None
        self._rest = rest
        return line.decode()

    def hear(self) -> None:
        """Take in what the keeper has said; waits until it says something.

        Raises:
            KeeperLostError: It was ended by somebody.
        """
        self._receive()
        self._take_in()

    def _take_in(self) -> None:
        while (line := self._next_line()) is not None:
            what, _, number = line.partition(" ")
            if what == "ended":
                status, _, had_children = number.partition(" ")
                self.had_children = {"True": True, "False": False}.get(had_children)
                self.returncode = os.waitstatus_to_exitcode(int(status))
            elif what == "stopped":
                self.stopped = int(number)
            elif what == "continued":
                self.stopped = None
            elif what == "parent":
                signal_number, _, sender = number.partition(" ")
                self.for_parent.append((int(signal_number), int(sender)))
            elif what == "alone":
                self.is_alone = True
            elif what == "gone":
                self._gone = self.is_alone = True

    def send(self, number: int) -> None:
        """Send the program a signal; nothing happens if it has ended."""
        self._say(f"kill {number}")

    def pass_on(self, number: int, sender: int) -> None:
        """Send the program a signal that this process got, unless their whole group got it."""
        self._say(f"pass {number} {sender}")

    def _say(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            pass  # The keeper is gone; who listens to it will hear.

    def end(self) -> None:
        """End the program and all that descends from it, and wait until it is gone."""
        self._say("end")
        try:
            while not self._gone:
                self.hear()
        except KeeperLostError:
            pass

    def close(self) -> None:
        """End what is left, and the keeper. Idempotent."""
        self._socket.close()
        if hasattr(self, "_process"):
            self._process.wait()


def _refuse_what_cannot_be_passed(command: Sequence[str], environment: Mapping[str, str]) -> None:
    for word in command:
        if "\0" in word:
            raise ValueError(f"the command has a null character, which no program gets: {word!r}")
    for name, value in environment.items():
        name, value = os.fsdecode(name), os.fsdecode(value)
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"the environment cannot have {name!r} as {value!r}")


class KeeperLostError(OSError):
    """The keeper ended before the program did: somebody else ended it."""
