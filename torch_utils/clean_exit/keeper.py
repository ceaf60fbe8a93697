"""The keeper: a process between the checker and the program, below which all of a run hangs.

Run as ``python -I -S keeper.py`` with a socket to the checker as its standard input. It starts
the program as its child, and adopts whatever loses its parent below it (a subreaper, prctl(2)),
so that a daemon without an environment is found, and nothing that existed before is taken for
the program's. It holds no file of the program's, reaps zombies, and sends signals only to a
child that it has not reaped: an id is never somebody else's. When the checker goes, however it
does, everything below the keeper is ended.

All signals but SIGCHLD stay blocked here. So one that a terminal, or kill, sends to the whole
process group comes here too, and tells that the program has got it itself. One that the program
sends to its parent alone, which is this process, is meant for who called the checker.

The checker writes, after the start message, lines: ``kill N``, ``pass N FROM`` (a signal that
the checker got), ``end``. The keeper writes: ``started PID``, ``failed ERRNO``, ``stopped N``,
``continued``, ``ended STATUS HAD_CHILDREN``, ``alone`` (then or later: nothing is left below),
``parent N FROM`` (a signal for who called), ``gone``.
"""

# The private modules: the public ones cost 20 ms, of enumerations that nothing here needs.
import _signal as signal
import _socket as socket
import marshal
import os
import select
import sys
import time

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from keeper_ending import descendants, end_all, is_below, send

_MOST_FILES = 3
_NOT_A_PROGRAM = 8  # ENOEXEC
_INVALID = 22  # EINVAL
_SET_CHILD_SUBREAPER = 36
_FOR_ONE_S = 0.1  # after so long a signal was not for the group: the checker would have said
_KNOWN_S = 5.0  # as long as that the checker may still say so, on a busy machine


def main():
    """Start a program, and keep it until it and all below it is gone."""
    control = socket.socket(fileno=0)
    files, start = _receive(control)
    every = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, every)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waker = os.pipe()
    os.set_blocking(waker[0], False)
    os.set_blocking(waker[1], False)
    signal.set_wakeup_fd(waker[1], warn_on_full_buffer=False)
    _become_subreaper()
    # What came before the program was there, it has not got.
    while _take(every - {signal.SIGCHLD}, 0) is not None:
        pass
    pid, error = _start(start, files)
    _forget_files(keep=(0, *waker))
    others = every - {signal.SIGCHLD}
    pending = _open_pending(others)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    if error:
        _say(control, f"failed {error}")
    else:
        _say(control, f"started {pid}")
        _Keeper(control, waker[0], pid, start["follows"]).serve(pending, others)
    os._exit(0)


def _take(numbers, patience_s):
    """Take a signal that is pending, or comes soon: its number and its sender; None if none is."""
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(numbers, patience_s)
        return None if info is None else (info.si_signo, info.si_pid)
    time.sleep(patience_s)  # macOS, which does not tell the sender.
    pending = signal.sigpending() & numbers
    return (signal.sigwait(pending), 0) if pending else None


def _open_pending(every):
    """Open a file that can be read when a signal is pending; None where that is not known."""
    try:
        import ctypes

        bits = sum(1 << (number - 1) for number in every)
        mask = ctypes.create_string_buffer(bits.to_bytes(8, sys.byteorder), 128)
        file = ctypes.CDLL(None).signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        return file if file >= 0 else None
    except (ImportError, OSError, AttributeError):
        return None  # Not Linux: what the program sends to its parent stays here.


def _receive(control):
    """Return the program's standard files, and what is said of its start."""
    size = socket.CMSG_SPACE(_MOST_FILES * 4)
    head, ancillary, _, _ = control.recvmsg(4, size)
    files = []
    for _, _, data in ancillary:
        files += [int.from_bytes(data[i : i + 4], sys.byteorder) for i in range(0, len(data), 4)]
    count, data = int.from_bytes(head, "big"), b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            raise SystemExit
        data += more
    return files, marshal.loads(data)


def _become_subreaper():
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # Not Linux: orphans cannot be found there.


def _start(start, files):
    """Start the program; return its process id, and the number of the error if it could not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        error = _INVALID  # Of what is no OSError: never 0, which would say that it runs.
        try:
            _become_program(start, files)
        except OSError as failure:
            error = failure.errno
        finally:
            os.write(writer, b"%d" % error)
            os._exit(127)
    os.close(writer)
    said = os.read(reader, 16)  # The program's exec closes it.
    os.close(reader)
    if said:
        os.waitpid(pid, 0)
    return pid, int(said or 0)


def _become_program(start, files):
    # Out of the way first: these numbers may be among those that are about to be replaced.
    high = [_above(file) for file in files]
    for number in range(3):
        if number in start["files"]:
            os.dup2(high[start["files"].index(number)], number)
        else:
            os.close(number)
    for file in (*high, *files):
        os.close(file)
    if start["cwd"] is not None:
        os.chdir(start["cwd"])
    # Python ignores these two for itself.
    for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", None)):
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    ignored = signal.SIGCHLD in start["ignored"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, start["mask"])
    _execute(start["command"], start["environment"])


def _above(file):
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD, 3)


def _execute(command, environment):
    """Execute as execvp(3) does: searched in PATH, a script without ``#!`` by the shell."""
    name = command[0]
    folders = [b""] if b"/" in name else os.get_exec_path(environment)
    denied = None
    for folder in folders:
        path = os.path.join(os.fsencode(folder), name)
        try:
            try:
                os.execve(path, command, environment)
            except OSError as error:
                if error.errno != _NOT_A_PROGRAM or not _is_text(path):
                    raise
                os.execve(b"/bin/sh", [b"/bin/sh", path, *command[1:]], environment)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            denied = denied or error
    raise denied or missing


def _is_text(path):
    with open(path, "rb") as file:
        return b"\0" not in file.read(512)


def _forget_files(keep):
    """Close all files but those kept, so that who waits for their end is not kept waiting."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        numbers = range(1, 1024)
    for number in numbers:
        if number not in keep:
            try:
                os.close(number)
            except OSError:
                pass


def _say(control, line):
    try:
        control.sendall(line.encode() + b"\n")
    except OSError:
        pass  # The checker is gone, which the next read says.


class _Keeper:
    """Keeps one program that has been started."""

    def __init__(self, control, waker, pid, follows):
        self._control, self._waker, self._pid = control, waker, pid
        self._checker = os.getppid() if follows else None
        self._ended = self._is_alone = False
        self._had_children = None
        self._rest = b""
        self._got = []  # signals that came here, of which the checker has not spoken yet

    def serve(self, pending, others):
        poll = select.poll()
        for file in (self._control.fileno(), self._waker, pending):
            if file is not None:
                poll.register(file, select.POLLIN)
        listening = True
        while listening:
            self._reap()
            ready = [file for file, _ in poll.poll(1000 * _FOR_ONE_S if self._got else None)]
            if self._waker in ready:
                self._drain()
            if pending in ready:
                self._note_pending(others)
            if self._control.fileno() in ready:
                listening = self._listen()
            self._hand_up()
        end_all(self._below)
        _say(self._control, "gone")

    def _note_pending(self, others):
        while (got := _take(others, 0)) is not None:
            self._note(got)

    def _note(self, got):
        self._got.append([got, time.monotonic(), is_below(got[1])])

    def _hand_up(self):
        """Tell of signals that the program sent to its parent."""
        now = time.monotonic()
        self._got = [entry for entry in self._got if now < entry[1] + _KNOWN_S]
        for entry in self._got:
            if entry[2] and now >= entry[1] + _FOR_ONE_S:
                entry[2] = False
                _say(self._control, "parent {} {}".format(*entry[0]))

    def _drain(self):
        try:
            os.read(self._waker, 4096)
        except BlockingIOError:
            pass

    def _reap(self):
        """Take in what has become of children; say whether there are any still."""
        flags = os.WNOHANG | os.WUNTRACED | getattr(os, "WCONTINUED", 0)
        status = None
        while True:
            self._look_for_children()
            try:
                pid, change = os.waitpid(-1, flags)
            except ChildProcessError:
                pid = -1
                break
            if pid == self._pid and (os.WIFEXITED(change) or os.WIFSIGNALED(change)):
                self._ended, status = True, change
            elif pid == self._pid:
                self._tell_of_stop(change)
            elif pid or self._ended:
                self._had_children = True  # The program has left it behind: ended, or at work.
            if pid == 0:
                break
        # Told when all that it left is known: the kernel hands that over before it ends.
        if status is not None:
            _say(self._control, f"ended {status} {self._had_children}")
        # Without children there is nothing further down: what lost its parent would be one. Nor
        # where it could not be told from the program, or ended (no /proc).
        if self._ended and not self._is_alone and (pid == -1 or descendants() is None):
            self._is_alone = True
            _say(self._control, "alone")
        return pid == 0

    def _tell_of_stop(self, status):
        if os.WIFSTOPPED(status):
            _say(self._control, f"stopped {os.WSTOPSIG(status)}")
            return
        _say(self._control, "continued")
        if self._checker == os.getppid():
            send(self._checker, signal.SIGCONT)  # It has stopped itself meanwhile.

    def _look_for_children(self):
        """Note whether the program, once it has ended, had waited for any child.

        True also if it may have had some without a trace: while SIGCHLD is ignored, none is left.
        """
        if self._had_children is not None or self._ended or not hasattr(os, "waitid"):
            return
        try:
            if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            with open(f"/proc/{self._pid}/stat", "rb") as file:
                stat = file.read()
            with open(f"/proc/{self._pid}/status", "rb") as file:
                ignored = int(file.read().partition(b"\nSigIgn:")[2].split(None, 1)[0], 16)
        except (OSError, IndexError):  # No /proc.
            return
        # Page faults of children that were waited for: each has some (proc(5), fields 11 and 13).
        fields = stat[stat.rindex(b")") + 2 :].split()
        ignores = ignored >> (signal.SIGCHLD - 1) & 1
        self._had_children = bool(int(fields[8]) + int(fields[10]) or ignores)

    def _listen(self):
        """Do what the checker says; False if that is to end."""
        try:
            data = self._control.recv(4096)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, *numbers = line.split()
            if what == b"end":
                return False
            number = int(numbers[0])
            if what == b"kill" or not self._group_got(number, int(numbers[1])):
                self._send(number)
        return True

    def _group_got(self, number, sender):
        """Say whether a signal that the checker got was sent to the whole process group."""
        stop = time.monotonic() + 0.05  # It may come here a moment later.
        while True:
            for entry in self._got:
                if entry[0] == (number, sender):
                    self._got.remove(entry)
                    return True
            got = _take({number}, max(0.0, stop - time.monotonic()))
            if got is None:
                return False
            self._note(got)

    def _send(self, number):
        self._reap()
        if not self._ended:
            try:
                os.kill(self._pid, number)
            except OSError:
                pass  # It has become another user's (setuid).

    def _below(self):
        # One that starts another and goes, while /proc is read, leaves none to be seen there; but
        # whatever descends from here descends from a child of this process, an adopted one too.
        for _ in range(100):
            has_children = self._reap()
            found = descendants()
            if found is None:
                return set() if self._ended else {(self._pid, None)}
            if found or not has_children:
                break
        return found


main()
