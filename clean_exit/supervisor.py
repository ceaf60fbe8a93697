"""The supervisor: a process between the checker and the program, and the ancestor of the whole run.

It is a subreaper (prctl(2)): orphaned descendants become its children. So daemons are found, and
no process that existed before counts as one of the program's. It signals only its descendants.
When the checker ends for any reason, the supervisor ends all of them and removes the run's folder.

    python -I -S supervisor.py SOCKET MASK FOLDER UNSET COMMAND...

The supervisor inherits the program's files, environment and current folder. It starts the program
with the signals in MASK blocked and without the variable UNSET, which this Python may have set (see
PEP 538). Then it closes the files. The checker writes the lines ``kill N [CODE PID]``, with the
sender of a signal that the checker has received, and ``end`` or ``leave`` for what remains. The
supervisor writes ``blind`` (it cannot adopt orphans), ``started PID``, ``failed ERRNO``, ``stopped
SECONDS`` and ``continued SECONDS`` (monotonic clock), ``ended STATUS SECONDS DELAY_NS`` (how long
the program had to wait for a processor), ``alone`` (it has no descendants any more) and ``gone``
(after ``end`` or ``leave``).
"""

# The private module, because importing `signal` takes 20 ms.
import _signal as signal
import os
import select
import sys
import time

_PATIENCE_S = 1.0  # between SIGTERM and SIGKILL
_KILL_S = 10.0  # for the kernel to end killed processes
_GROUP_S = 0.05  # for the same signal to reach the other processes of the group
_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Starts one program and supervises it until it and its descendants have ended."""

    def __init__(self, control: int) -> None:
        self._control = control
        self._pid = None
        self._is_ended = self._is_alone = False
        self.is_leaving: bool = False
        self._rest = b""
        self._of_group = 0, [], 0.0  # the last signal that was sent to the group

    def run(self, mask: list[int], command: list[str]) -> None:
        """Start the program and serve the checker until the checker ends."""
        reader, writer = os.pipe()
        for file in (reader, writer):
            os.set_blocking(file, False)
        # A signal to the process group must not end the supervisor before the program.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if not _become_subreaper():
            self._send("blind")
        try:
            # What came before is not for the program alone: the checker passes it on.
            while _next_signal(signal.valid_signals() - {signal.SIGCHLD}, 0):
                pass
            # Python ignores these two signals for itself.
            defaults = [signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)]
            self._pid = os.posix_spawnp(
                command[0], command, os.environ, setsigmask=mask, setsigdef=defaults
            )
        except OSError as error:
            self._send(f"failed {error.errno}")
            return
        _close_files(keep=(self._control, reader, writer))
        self._send(f"started {self._pid}")
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(reader, select.POLLIN)
        listening = True
        while listening:
            self._reap()
            ready = [file for file, _ in poll.poll()]
            if reader in ready:
                os.read(reader, 4096)
            if self._control in ready:
                listening = self._receive()

    def _send(self, line):
        try:
            os.write(self._control, line.encode() + b"\n")
        except OSError:
            pass  # The checker has ended; the next read shows it.

    def _reap(self):
        """Reap ended children; return whether there are others."""
        while True:
            now = time.monotonic()
            delay_ns = 0 if self._is_ended else run_delay_ns(self._pid)  # Also of a zombie.
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                pid = -1
            if pid <= 0:
                break
            if pid == self._pid and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                self._send(f"{'stopped' if os.WIFSTOPPED(status) else 'continued'} {now!r}")
            elif pid == self._pid:
                self._is_ended = True
                self._send(f"ended {status} {now!r} {delay_ns}")
        # Without children there are no descendants: an orphan would be a child.
        if self._is_ended and not self._is_alone and (pid == -1 or not _can_list_processes()):
            self._is_alone = True
            self._send("alone")
        return pid == 0

    def _receive(self):
        """Obey the checker; return False if it has ended."""
        try:
            data = os.read(self._control, 4096)
        except OSError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, *numbers = line.split()
            if what in (b"end", b"leave"):
                self.is_leaving = what == b"leave"
                if not self.is_leaving:
                    self.end_all()
                self._send("gone")
            elif not self._is_ended:
                number, *sender = map(int, numbers)
                if sender and self._program_has(number, sender):
                    continue
                self._reap()
                try:
                    os.kill(self._pid, number)
                except OSError:
                    pass  # It belongs to another user now (setuid).
        return bool(data)

    def _program_has(self, number, sender):
        """Whether the program has a signal of the checker: it was sent to its group as well."""
        while found := _next_signal([number], _GROUP_S):
            if found == sender:  # Sent to the group of this process.
                self._of_group = number, sender, time.monotonic()
                return os.getpgid(self._pid) == os.getpgrp()
        # timeout(1) signals its child and then the group, so the checker may have both.
        earlier, its_sender, at_s = self._of_group
        return (earlier, its_sender) == (number, sender) and time.monotonic() < at_s + 2 * _GROUP_S

    def end_all(self) -> None:
        """End all descendants: SIGTERM first, and SIGKILL for those that remain."""
        if not _can_list_processes():
            self._end_program()
            return
        signalled, foreign = set(), set()
        for number, duration_s in ((signal.SIGTERM, _PATIENCE_S), (signal.SIGKILL, _KILL_S)):
            stop = time.monotonic() + duration_s
            while time.monotonic() < stop:
                found = {k: p for k, p in self._descendants().items() if k not in foreign}
                if not found:
                    return
                for key, process in found.items():
                    if number == signal.SIGTERM and key in signalled:
                        continue
                    if not send_signal(process, number):
                        foreign.add(key)  # Another user's process.
                    send_signal(process, signal.SIGCONT)
                signalled |= found.keys()
                time.sleep(0.01)

    def _descendants(self):
        """Return the live descendants by id and start time."""
        # A process that forks and exits while /proc is read can hide its child. Then a child of
        # this process is left, and another look finds it.
        found = []
        for _ in range(100):
            has_children = self._reap()
            found = descendants(os.getpid()) or []
            if found or not has_children:
                break
        return {(process.pid, process.ticks): process for process in found}

    def _end_program(self):
        """End only the program, on a system without /proc."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            stop = time.monotonic() + _PATIENCE_S
            while self._pid and self._reap() and not self._is_ended and time.monotonic() < stop:
                try:
                    os.kill(self._pid, number)
                except OSError:
                    return  # It belongs to another user now.
                time.sleep(0.05)


def _next_signal(numbers, timeout_s):
    """Return who sent the next of some signals to this process, which blocks them all."""
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(numbers, timeout_s)
        return info and [info.si_code, info.si_pid]
    pending = signal.sigpending() & set(numbers)  # macOS, where the sender is not known.
    return pending and signal.sigwait(pending) and [0, 0]


def _can_list_processes():
    return descendants(os.getpid()) is not None


def _become_subreaper():
    """Adopt orphaned descendants from now on; return whether the system allows it."""
    try:
        import ctypes

        return ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError):
        return False  # Not Linux.


def _close_files(keep):
    """Close the program's files: a reader may wait for their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        numbers = range(1024)
    for number in numbers:
        if number > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:
                pass


def _remove(folder):
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        pass  # The checker has removed it, or the run has none.


def main() -> None:
    """Run the supervisor's command line."""
    control, mask, folder, unset, *command = sys.argv[1:]
    os.environ.pop(unset, None)
    os.set_inheritable(int(control), False)
    supervisor = Supervisor(int(control))
    try:
        supervisor.run([int(number) for number in mask.split(",") if number], command)
    finally:
        if not supervisor.is_leaving:
            supervisor.end_all()
        _remove(folder)
    os._exit(0)


if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from processes import descendants, run_delay_ns, send_signal

    main()
