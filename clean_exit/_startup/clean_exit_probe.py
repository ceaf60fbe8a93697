"""The probe of clean-exit: what only the program's own interpreter can see of its end.

Runs inside of whatever program is checked, before it. So it needs little, raises nothing and
changes little that the program could notice. All that its functions use is bound to them: they are
called until the interpreter has been taken apart.

It appends lines to a file that the checker reads, each the repr() of a tuple that begins with a
kind, the process's id, the time (seconds, monotonic) and the phase:
main -> threads (main module ended) -> atexit -> teardown.
"""

import os
import sys

STACKS_SIGNAL = 62  # A real-time signal that hardly any program uses; the checker sends it.
_IN_FULL = 3  # errors alike that are recorded one by one; the others are counted
_KINDS = 64  # of errors that are told apart by their message
_FRAMES = 30  # entries of a traceback that are recorded
_LETTERS = 2000  # of a message
_NAMED = ("function", "builtin_function_or_method", "method", "type", "generator", "coroutine")


def install(events):
    """Begin to record into the file ``events``."""
    import atexit
    import time

    state = {"phase": "main", "audited": False, "forked": False}
    record = _make_record(events, state, time.monotonic)
    record("start", " ".join(getattr(sys, "orig_argv", ())), _start_ticks())
    open_own_stacks = _offer_stacks(os.path.dirname(events))
    note, flush, forget = _make_note(record, state)
    hook = _watch_unraisable(note, state)
    if _mentions_hook():
        _listen(note, state)
    _watch_threads(record, note, flush, state, hook)
    atexit.register(_make_last_callback(record, flush, state))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_make_after_fork(forget, state, open_own_stacks))
    _watch_shared_memory(record)
    _watch_tracker(record)


def _make_record(path, state, monotonic):
    """Return a function that appends one line."""
    # Without waiting: the program may have put a pipe there.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)

    def record(
        kind,
        *fields,
        _open=os.open,
        _write=os.write,
        _close=os.close,
        _getpid=os.getpid,
        _repr=repr,
        _failure=BaseException,
    ):
        try:
            entry = (kind, _getpid(), monotonic(), state["phase"], *fields)
            line = (_repr(entry) + "\n").encode("utf-8", "backslashreplace")
            file = _open(path, flags)
            try:
                _write(file, line)
            finally:
                _close(file)
        except _failure:
            pass  # The file is out of reach, or the interpreter is nearly gone.

    return record


def _start_ticks():
    """Return when this process was started (proc(5)); None where that is not known."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except Exception:  # Not Linux, another root, an audit hook that forbids.
        return None


def _offer_stacks(folder):
    """Have stacks of all threads written when the checker asks, and when this process crashes.

    Returns a function that gives a forked child a file of its own, of the same number.
    """
    number = identity = None

    def open_own(_failure=Exception):
        nonlocal number, identity
        try:
            path = os.path.join(folder, "stacks-%d" % os.getpid())
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if number is None:
                    number = _free_number()
                elif os.fstat(number)[1:3] != identity:
                    return  # The program has put a file of its own there.
                os.dup2(file, number, inheritable=False)
                identity = os.fstat(number)[1:3]
            finally:
                os.close(file)
        except _failure:
            pass  # Few open files, another root or user: no stacks.

    try:
        import faulthandler

        open_own()
        if number is not None:
            faulthandler.register(STACKS_SIGNAL, file=number, all_threads=True)
            if not faulthandler.is_enabled():
                faulthandler.enable(file=number)
    except Exception:  # A Python without faulthandler.
        pass
    return open_own


def _free_number():
    """Return a number for a file of the probe's, far from those that a program's own files get."""
    for number in range(250, 260):
        try:
            os.fstat(number)
        except OSError:
            return number
    raise OSError("all are in use")


def _name_object(thing, _type=type, _named=_NAMED):
    """Name an object without running any of its code."""
    if thing is None:
        return ""
    kind = _type(thing)
    name = thing.__qualname__ if kind.__name__ in _named else ""
    return "%s.%s %s" % (kind.__module__, kind.__qualname__, name)


def _describe(
    error, traceback, _type=type, _str=str, _failure=BaseException, _most=_FRAMES, _letters=_LETTERS
):
    """Return the error's type, its message, and where it was, innermost last."""
    kind = _type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = kind.__module__ + "." + name
    try:
        message = _str(error)[:_letters]
    except _failure:
        message = "<no message>"
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return name, message, places[-_most:]


def _make_note(record, state):
    """Return functions that record an error, record how often each was seen, and forget that."""
    seen = {}
    length, least, kinds = len, _IN_FULL, _KINDS

    def note(kind, said, error, traceback, _describe=_describe, _failure=BaseException):
        try:
            name, message, places = _describe(error, traceback)
            key = (kind, state["phase"], said, name, message[:200])
            if key not in seen and length(seen) >= kinds:
                key = (kind, state["phase"], (), "", "")
            count = seen[key] = seen.get(key, 0) + 1
            if count <= least:
                record(kind, *said, name, message, places)
            elif not count & (count - 1):
                record("again", count, *key)
        except _failure:
            pass  # A hook that raises would change what the program does.

    def flush(_list=list):
        for key, count in _list(seen.items()):
            if count > least:
                record("again", count, *key)
        seen.clear()

    return note, flush, seen.clear


def _watch_unraisable(note, state):
    """Stand before sys.unraisablehook; return the hook that is there now."""
    usual = sys.unraisablehook

    def unraisablehook(info, _note=_note_unraisable):
        if not state["audited"]:
            _note(note, info)
        return usual(info)

    if sys.__unraisablehook__ is usual:
        sys.__unraisablehook__ = unraisablehook
    sys.unraisablehook = unraisablehook
    return unraisablehook


def _note_unraisable(note, info, _name=_name_object, _failure=BaseException):
    try:
        said = (info.err_msg or "Exception ignored in", _name(info.object))
        note("unraisable", said, info.exc_value, info.exc_traceback)
    except _failure:
        pass


def _listen(note, state, _note=_note_unraisable):
    """Record unraisable errors by an audit hook, whatever sys.unraisablehook is.

    In programs that replace it only: an audit hook slows down each id() and open().
    """

    def hook(event, args, _event="sys.unraisablehook"):
        if event == _event:
            _note(note, args[1])

    try:
        sys.addaudithook(hook)
        state["audited"] = True
    except Exception:  # A hook of the program's own forbids it.
        pass


def _mentions_hook():
    """Say whether the program's main file, or the code it was given, replaces the hook."""
    try:
        words = sys.orig_argv
        if "-c" in words[: len(words) - len(sys.argv) + 1]:
            return "unraisablehook" in words[words.index("-c") + 1]
        if os.stat(sys.argv[0]).st_mode & 0o170000 != 0o100000:
            return False  # A pipe, whose bytes would be gone for the program.
        with open(sys.argv[0], "rb") as file:
            return b"unraisablehook" in file.read(1 << 18)
    except Exception:  # A module, a folder, standard input; or what cannot be read.
        return False


def _watch_threads(record, note, flush, state, hook):
    """Record errors that end threads, and when the main module has ended."""
    import threading

    usual = threading.excepthook

    def excepthook(args, _exit=SystemExit, _failure=BaseException):
        try:
            if args.exc_type is not _exit:
                name = args.thread.name if args.thread is not None else ""
                note("thread", (name,), args.exc_value, args.exc_traceback)
        except _failure:
            pass
        return usual(args)

    threading.excepthook = threading.__excepthook__ = excepthook
    join = getattr(threading, "_shutdown", None)
    if join is None:  # Another Python: it is not known when the main module ends.
        return

    def _shutdown():
        # Called by the interpreter when the main module has ended, however it did; and by
        # multiprocessing in a forked child, which may leave without ever getting further.
        flush()
        state["phase"] = "threads"
        record("main-ended")
        if getattr(sys, "unraisablehook", None) is not hook and not state["audited"]:
            _listen(note, state)
        if state["forked"]:
            _record_group("process-group-at-main-end", record, state)
        try:
            return join()
        finally:
            flush()
            state["phase"] = "atexit"
            record("atexit")

    threading._shutdown = _shutdown


def _process_group(_modules=sys.modules):
    """Return torch's default process group if there is one, as far as it can be told."""
    distributed = _modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None, ""
    world = getattr(getattr(distributed, "group", None), "WORLD", True)
    return id(world), distributed.get_backend()


def _record_group(kind, record, state, _ask=_process_group, _failure=BaseException):
    try:
        group, backend = _ask()
        # A forked child has its parent's, which is not its to destroy.
        if group is not None and group != state.get("inherited_group"):
            record(kind, backend)
    except _failure:
        pass  # torch is there by halves, or what the program put in its place.


def _make_after_fork(forget, state, open_own_stacks):
    def after_fork(_ask=_process_group, _failure=BaseException):
        forget()  # The parent's are the parent's to record.
        state["forked"] = True
        open_own_stacks()
        try:
            state["inherited_group"] = _ask()[0]
        except _failure:
            pass

    return after_fork


def _make_last_callback(record, flush, state, _record_group=_record_group):
    """Return the atexit callback that runs after all others: it was registered before them."""

    def last():
        flush()
        _record_group("process-group", record, state)
        state["phase"] = "teardown"
        record("teardown")

    return last


def _watch_tracker(record):
    """Record what the process that is Python's resource tracker finds left.

    It says so in a warning, which -W ignore silences, and which goes where stderr goes.
    """
    if "resource_tracker import main" not in " ".join(getattr(sys, "orig_argv", ())):
        return
    import warnings

    usual = warnings.warn

    def warn(message, category=None, stacklevel=1, *more, _failure=Exception, **options):
        try:
            words = message.split()
            if words[0] == "resource_tracker:" and "leaked" in words:
                place = words.index("leaked")
                record("leaked", words[place + 1], int(words[place - 1]), message)
        except _failure:
            pass
        return usual(message, category, stacklevel + 1, *more, **options)

    warnings.warn = warn


def _watch_shared_memory(record):
    """Record which blocks of shared memory are made and removed."""
    try:
        import _posixshmem

        make, remove = _posixshmem.shm_open, _posixshmem.shm_unlink
    except (ImportError, AttributeError):  # Not on this system, or another Python.
        return

    def shm_open(path, flags, *args, _creates=os.O_CREAT, **options):
        made = make(path, flags, *args, **options)
        if flags & _creates:
            record("shared-memory", path)
        return made

    def shm_unlink(path):
        record("shared-memory-removed", path)
        return remove(path)

    _posixshmem.shm_open, _posixshmem.shm_unlink = shm_open, shm_unlink
