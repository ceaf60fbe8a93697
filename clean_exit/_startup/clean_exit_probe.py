"""The probe of clean-exit: observes the end of the interpreter from inside.

It runs in every checked program, before the program itself. So it imports little, raises nothing
and changes little that the program could notice. Its functions bind everything that they use,
because they are called until the end of the interpreter's teardown.

It appends lines to a file that the checker reads. Each line is the repr() of a tuple: the kind,
the process id, the time (seconds, monotonic clock), the phase and more fields. The phases are
main -> threads (the main module has ended) -> atexit -> teardown.
"""

import os
import sys

STACKS_SIGNAL = 62  # A real-time signal that hardly any program uses; the checker sends it.
_IN_FULL = 3  # equal errors that are recorded one by one; the others are counted
_KINDS = 64  # errors that are distinguished by their message
_FRAMES = 30  # recorded entries of a traceback
_CHARACTERS = 2000  # recorded characters of a message
_NAMED = ("function", "builtin_function_or_method", "method", "type", "generator", "coroutine")


def install(events):
    """Start recording to the file ``events``."""
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
    """Return a function that appends a line."""
    # Non-blocking, because the program may have put a pipe there.
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
            pass  # The file cannot be opened any more, or the teardown is nearly complete.

    return record


def _start_ticks():
    """Return the start of this process in clock ticks (proc(5)); None if it is not known."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except Exception:  # Not Linux, another root, or an audit hook that forbids it.
        return None


def _offer_stacks(folder):
    """Make faulthandler write the stacks of all threads after the checker's signal or a crash.

    Returns a function that gives a forked child its own file with the same number.
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
                    return  # The program has replaced the file.
                os.dup2(file, number, inheritable=False)
                identity = os.fstat(number)[1:3]
            finally:
                os.close(file)
        except _failure:
            pass  # Too few open files, another root or another user: there are no stacks.

    try:
        import faulthandler

        open_own()
        if number is not None:
            faulthandler.register(STACKS_SIGNAL, file=number, all_threads=True)
            if not faulthandler.is_enabled():
                faulthandler.enable(file=number)
    except Exception:  # This Python has no faulthandler.
        pass
    return open_own


def _free_number():
    """Return a number for the probe's file, far from the numbers of the program's files."""
    for number in range(250, 260):
        try:
            os.fstat(number)
        except OSError:
            return number
    raise OSError("all are in use")


def _name_object(thing, _type=type, _named=_NAMED):
    """Return the name of an object without running its code."""
    if thing is None:
        return ""
    kind = _type(thing)
    name = thing.__qualname__ if kind.__name__ in _named else ""
    return "%s.%s %s" % (kind.__module__, kind.__qualname__, name)


def _describe(
    error, traceback, _type=type, _str=str, _failure=BaseException, _most=_FRAMES,
    _characters=_CHARACTERS,
):  # fmt: skip
    """Return the type of an error, its message, and its places, the innermost last."""
    kind = _type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = kind.__module__ + "." + name
    try:
        message = _str(error)[:_characters]
    except _failure:
        message = "<no message>"
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return name, message, places[-_most:]


def _make_note(record, state):
    """Return functions that record an error, record the counts of errors, and reset the counts."""
    counts = {}
    length, in_full, kinds = len, _IN_FULL, _KINDS

    def note(kind, context, error, traceback, _describe=_describe, _failure=BaseException):
        try:
            name, message, places = _describe(error, traceback)
            key = (kind, state["phase"], context, name, message[:200])
            if key not in counts and length(counts) >= kinds:
                key = (kind, state["phase"], (), "", "")
            count = counts[key] = counts.get(key, 0) + 1
            if count <= in_full:
                record(kind, *context, name, message, places)
        except _failure:
            pass  # A hook that raises would change the program's behaviour.

    def flush(_list=list):
        for key, count in _list(counts.items()):
            if count > in_full:
                record("again", count, *key)
        counts.clear()

    return note, flush, counts.clear


def _watch_unraisable(note, state):
    """Wrap sys.unraisablehook; return the wrapper."""
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
        context = (info.err_msg or "Exception ignored in", _name(info.object))
        note("unraisable", context, info.exc_value, info.exc_traceback)
    except _failure:
        pass


def _listen(note, state, _note=_note_unraisable):
    """Record unraisable errors by an audit hook, for programs that replace sys.unraisablehook.

    Other programs have none, because an audit hook slows down each id() and open().
    """

    def hook(event, args, _event="sys.unraisablehook"):
        if event == _event:
            _note(note, args[1])

    try:
        sys.addaudithook(hook)
        state["audited"] = True
    except Exception:  # Another audit hook forbids it.
        pass


def _mentions_hook():
    """Whether the program's main file, or the code after -c, mentions the hook."""
    try:
        words = sys.orig_argv
        if "-c" in words[: len(words) - len(sys.argv) + 1]:
            return "unraisablehook" in words[words.index("-c") + 1]
        if os.stat(sys.argv[0]).st_mode & 0o170000 != 0o100000:
            return False  # A pipe: the program could not read the bytes again.
        with open(sys.argv[0], "rb") as file:
            return b"unraisablehook" in file.read(1 << 18)
    except Exception:  # A module, a folder, standard input, or an unreadable file.
        return False


def _watch_threads(record, note, flush, state, hook):
    """Record errors that end threads, and the end of the main module."""
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
    if join is None:  # Another implementation of Python, without this private function.
        return

    def _shutdown():
        # The interpreter calls this after the main module. multiprocessing calls it in a forked
        # child, which may then end without atexit and teardown.
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
    """Return the id and the backend of torch's default process group; None without a group."""
    distributed = _modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None, ""
    world = getattr(getattr(distributed, "group", None), "WORLD", True)
    return id(world), distributed.get_backend()


def _record_group(kind, record, state, _ask=_process_group, _failure=BaseException):
    try:
        group, backend = _ask()
        # A forked child does not have to destroy the group of its parent.
        if group is not None and group != state.get("inherited_group"):
            record(kind, backend)
    except _failure:
        pass  # torch is only partly imported, or the program has replaced it.


def _make_after_fork(forget, state, open_own_stacks):
    def after_fork(_ask=_process_group, _failure=BaseException):
        forget()  # The parent records its own counts.
        state["forked"] = True
        open_own_stacks()
        try:
            state["inherited_group"] = _ask()[0]
        except _failure:
            pass

    return after_fork


def _make_last_callback(record, flush, state, _record_group=_record_group):
    """Return the atexit callback that runs last, because it is registered first."""

    def last():
        flush()
        _record_group("process-group", record, state)
        state["phase"] = "teardown"
        record("teardown")

    return last


def _watch_tracker(record):
    """Record the leaks that Python's resource tracker finds, if this process is the tracker.

    It reports them by a warning, which -W ignore hides.
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
    """Record the blocks of shared memory that are created and removed."""
    try:
        import _posixshmem

        create, remove = _posixshmem.shm_open, _posixshmem.shm_unlink
    except (ImportError, AttributeError):  # Another system or implementation of Python.
        return

    def shm_open(path, flags, *args, _creates=os.O_CREAT, **options):
        file = create(path, flags, *args, **options)
        if flags & _creates:
            record("shared-memory", path)
        return file

    def shm_unlink(path):
        record("shared-memory-removed", path)
        return remove(path)

    _posixshmem.shm_open, _posixshmem.shm_unlink = shm_open, shm_unlink
