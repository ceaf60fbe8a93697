"""The keeper: a process between the checker and the program, below which all of a run hangs.

It adopts whatever loses its parent below it (a subreaper, prctl(2)). So a daemon is found, and
nothing that existed before is taken for the program's. It signals only what descends from it, and
when the checker goes, however it does, it ends everything below and removes the run's folder.

    python -I -S keeper.py SOCKET MASK FOLDER UNSET COMMAND...

It has the program's files, environment and current folder. It starts the program with the signals
in MASK blocked, without the variable UNSET, which this Python may have added (PEP 538), and lets
go of the files. The checker writes lines: ``kill N``, ``end``. The keeper
writes: ``started PID``, ``failed ERRNO``, ``ended STATUS SECONDS`` (on the monotonic clock),
``alone`` (nothing is left below), ``gone`` (after ``end``).
"""

# The private module: `signal` costs 20 ms, of enumerations that nothing here needs.
import _signal as signal
import os
import select
import sys
import time

_PATIENCE_S = 1.0  # between SIGTERM and SIGKILL
_LAST_RESORT_S = 10.0  # for the kernel to end what was killed
_SET_CHILD_SUBREAPER = 36


class Keeper:
    """Starts one program, and keeps it until it and all below it is gone."""

    def __init__(self, control: int) -> None:
        self._control = control
        self._pid = None
        self._is_ended = self._is_alone = False
        self._rest = b""

    def run(self, mask: list[int], command: list[str]) -> None:
        """Start the program, and serve the checker until that goes."""
        reader, writer = os.pipe()
        for file in (reader, writer):
            os.set_blocking(file, False)
        # No signal to the process group may end this process before the program.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _become_subreaper()
        try:
            # Python ignores these two signals for itself.
            defaults = [signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)]
            self._pid = os.posix_spawnp(
                command[0], command, os.environ, setsigmask=mask, setsigdef=defaults
            )
        except OSError as error:
            self._say(f"failed {error.errno}")
            return
        _close_files(keep=(self._control, reader, writer))
        self._say(f"started {self._pid}")
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
                listening = self._listen()

    def _say(self, line):
        try:
            os.write(self._control, line.encode() + b"\n")
        except OSError:
            pass  # The checker is gone, which the next read says.

    def _reap(self):
        """Take in what has become of children; say whether there are any still."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = -1
            if pid == self._pid:
                self._is_ended = True
                self._say(f"ended {status} {time.monotonic()!r}")
            elif pid <= 0:
                break
        # Without children there is nothing further down: what lost its parent would be one.
        if self._is_ended and not self._is_alone and (pid == -1 or not self._can_look()):
            self._is_alone = True
            self._say("alone")
        return pid == 0

    def _can_look(self):
        return descendants(os.getpid()) is not None

    def _listen(self):
        """Do what the checker says; False when it is gone."""
        try:
            data = os.read(self._control, 4096)
        except OSError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, *numbers = line.split()
            if what == b"end":
                self.end_all()
                self._say("gone")
            elif not self._is_ended:
                self._reap()
                try:
                    os.kill(self._pid, int(numbers[0]))
                except OSError:
                    pass  # It has become another user's (setuid).
        return bool(data)

    def end_all(self) -> None:
        """End all that is below, again until nothing is: some start another."""
        if descendants(os.getpid()) is None:
            self._end_program()
            return
        told, beyond = set(), set()
        stop = time.monotonic() + _PATIENCE_S
        while time.monotonic() < stop:
            found = {key: p for key, p in self._below().items() if key not in beyond}
            if not found:
                return
            for key in found.keys() - told:
                if not send_signal(found[key], signal.SIGTERM):
                    beyond.add(key)
                send_signal(found[key], signal.SIGCONT)
            told |= found.keys()
            time.sleep(0.01)
        stop = time.monotonic() + _LAST_RESORT_S
        while time.monotonic() < stop:
            stopped = {}
            # First all are held, so that none can start another behind this one's back.
            while found := {k: p for k, p in self._below().items() if k not in {*stopped, *beyond}}:
                for key, process in found.items():
                    stopped[key] = process
                    if not send_signal(process, signal.SIGSTOP):
                        beyond.add(key)
            held = [process for key, process in stopped.items() if key not in beyond]
            for process in held:
                send_signal(process, signal.SIGKILL)
            if not held:
                return
            time.sleep(0.01)

    def _below(self):
        """Return what is alive below, by id and start."""
        # One that starts another and goes, while /proc is read, leaves none to be seen there; but
        # whatever descends from here descends from a child of this process, an adopted one too.
        found = []
        for _ in range(100):
            has_children = self._reap()
            found = descendants(os.getpid()) or []
            if found or not has_children:
                break
        return {(process.pid, process.ticks): process for process in found}

    def _end_program(self):
        """End the program alone, where there is no /proc to find others."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            stop = time.monotonic() + _PATIENCE_S
            while self._pid and self._reap() and not self._is_ended and time.monotonic() < stop:
                try:
                    os.kill(self._pid, number)
                except OSError:
                    return  # It has become another user's.
                time.sleep(0.05)


def _become_subreaper():
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # Not Linux: orphans cannot be found there.


def _close_files(keep):
    """Let go of the program's files: somebody may wait for their end."""
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
        pass  # The checker has removed it, or there was none.


def main() -> None:
    """Run the keeper's command line."""
    control, mask, folder, unset, *command = sys.argv[1:]
    os.environ.pop(unset, None)
    os.set_inheritable(int(control), False)
    keeper = Keeper(int(control))
    try:
        keeper.run([int(number) for number in mask.split(",") if number], command)
    finally:
        keeper.end_all()
        _remove(folder)
    os._exit(0)


if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from processes import descendants, send_signal

    main()
