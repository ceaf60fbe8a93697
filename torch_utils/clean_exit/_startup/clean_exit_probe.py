"""The probe of clean-exit: what only the program's own interpreter can see of its end.

Runs inside of whatever program is checked, before it, so it has to be small, to need little, to
raise nothing and to change nothing that the program could notice. All that its functions use is
bound to them: they are called until the interpreter has been taken apart.

It appends lines to a file that the checker reads, each the repr() of a tuple that begins with a
kind, the process's id, the time (seconds, monotonic) and the phase:
main -> threads (main module ended) -> atexit -> teardown.
"""

import sys

import clean_exit_children as children
from clean_exit_errors import describe_error, name_object
from clean_exit_stacks import offer_stacks

_OWN_FILES = range(250, 260)  # Far from the numbers that a program's own files get.
_IN_FULL = 3  # errors alike that are recorded one by one; the others are counted
_KINDS = 64  # of errors that are told apart by their message
_INTERPRETERS = ("_interpreters", "_xxsubinterpreters", "_testcapi", "_testinternalcapi")
_SPEAKERS = ("asyncio", "multiprocessing.queues", "resource_tracker")  # print about ends


def install(path, here):
    """Begin to record into ``path``."""
    import atexit
    import os
    import time

    state = {
        "phase": "main",
        "lost": 0,  # entries that could not be written
        "audited": False,
        "replaced": False,  # sys.unraisablehook, unseen
        "spawned": False,
        "forked": False,
    }
    record = _make_record(path, state, os, time.monotonic)
    version = "%d.%d.%d" % sys.version_info[:3]
    record("start", version, os.path.basename(sys.executable or ""), _read_stat(os)[0])
    offer_stacks(path, record, _keep_open, _read_stat, os)
    note, flush, forget = _make_note(record, state)
    hook = _watch_unraisable(note, state)
    if _mentions_hook(os):
        _listen(note, state)
    _watch_threads(record, note, flush, state, hook)
    atexit.register(_make_last_callback(record, flush, state, os))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: children.watch_crashes(record, sys),
            after_in_parent=lambda: state.update(spawned=True),
            after_in_child=_make_after_fork(forget, state),
        )
    children.follow(path, here, record, state, os, sys)
    children.watch_shared_memory(record)
    children.watch_tracker(record, sys)


def _keep_open(file, os):
    """Give a file a number of its own; None if there is none to be had. Closes the first one."""
    try:
        for number in _OWN_FILES:
            try:
                os.fstat(number)
            except OSError:
                os.dup2(file, number, inheritable=False)
                return number
    except OSError:
        pass  # The program may have few open files only.
    finally:
        os.close(file)
    return None


def _make_record(path, state, os, monotonic):
    """Return a function that appends one line.

    It has a file of its own, which stays in reach whatever root and user the program takes. Where
    the program closes that (daemons do) or uses its number for another, it opens the path anew.
    What it could not write it counts.
    """
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    number = identity = None
    try:
        file = os.open(path, flags)
        identity = os.fstat(file)[1:3]
        number = _keep_open(file, os)
    except OSError:
        pass

    def record(
        kind,
        *fields,
        _open=os.open,
        _write=os.write,
        _close=os.close,
        _fstat=os.fstat,
        _getpid=os.getpid,
        _repr=repr,
        _error=OSError,
        _failure=BaseException,
    ):
        try:
            entry = (kind, _getpid(), monotonic(), state["phase"], *fields)
            line = (_repr(entry) + "\n").encode("utf-8", "backslashreplace")
            try:
                if number is not None and _fstat(number)[1:3] == identity:
                    _write(number, line)
                    return
            except _error:
                pass  # It was closed.
            file = _open(path, flags)
            try:
                _write(file, line)
            finally:
                _close(file)
        except _failure:
            # The file is out of reach, or the interpreter is nearly gone. The checker is told
            # at the end, and then goes by its other evidence.
            state["lost"] += 1

    return record


def _read_stat(os):
    """Return when this process was started, and the page faults of its children that ended.

    These are 0 only if it had none, for whatever runs causes some. None where that is not known.
    """
    try:
        file = os.open("/proc/self/stat", os.O_RDONLY)
        try:
            fields = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
        return int(fields[19]), int(fields[8]) + int(fields[10])
    except Exception:  # Not Linux, another root, no more open files; an audit hook that forbids.
        return None, None


def _make_note(record, state):
    """Return functions that record an error, record how often each was seen, and forget that."""
    seen = {}
    length, least = len, _IN_FULL

    def note(kind, said, error, traceback, _describe=describe_error, _failure=BaseException):
        try:
            name, message, places = _describe(error, traceback)
            key = (kind, state["phase"], said, name, message[:200])
            if key not in seen and length(seen) >= _KINDS:
                key = (kind, state["phase"], (), name, "")
                if key not in seen and length(seen) >= 2 * _KINDS:
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
    """Stand before sys.unraisablehook; return what stands there now."""
    usual = sys.unraisablehook

    def unraisablehook(info):
        if not state["audited"]:
            _note_unraisable(note, info)
        return usual(info)

    if sys.__unraisablehook__ is usual:
        sys.__unraisablehook__ = unraisablehook
    sys.unraisablehook = unraisablehook
    return unraisablehook


def _listen(note, state):
    """Record unraisable errors from an audit hook: it sees them whatever hook is in place.

    For programs that replace sys.unraisablehook only, for an audit hook is called for every
    id(), every log record, every open().
    """

    def hook(event, args):
        if event == "sys.unraisablehook":
            _note_unraisable(note, args[1])

    if not state["audited"]:
        state["audited"] = True
        _add_hook(hook, state)


def _add_hook(hook, state):
    try:
        sys.addaudithook(hook)
    except Exception:  # A hook of the program's own forbids it: what happens is not seen.
        state["replaced"] = True


def _watch_execution(record, state):
    """Record that this process becomes another program, whose end the record says nothing of.

    Seen from where nothing but callbacks and destructors run: a program that does it before never
    gets to the end of its record.
    """

    def hook(event, args, _event="os.exec"):
        if event == _event:
            record("executed")

    _add_hook(hook, state)


def _mentions_hook(os):
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


def _note_unraisable(note, info, _failure=BaseException):
    try:
        said = (info.err_msg or "Exception ignored in", name_object(info.object))
        note("unraisable", said, info.exc_value, info.exc_traceback)
    except _failure:
        pass


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
    join = threading._shutdown

    def _shutdown():
        # Called by the interpreter when the main module has ended, however it did; and by
        # multiprocessing in a forked child, which may leave without ever getting further.
        flush()
        state["phase"] = "threads"
        record("main-ended")
        if getattr(sys, "unraisablehook", None) is not hook:
            state["replaced"] = not state["audited"]
            _listen(note, state)
        _watch_excepthook(note, state)
        if state["forked"]:
            _record_group("process-group-at-main-end", record, state)
        try:
            return join()
        finally:
            flush()
            state["phase"] = "atexit"
            record("atexit")
            _watch_execution(record, state)

    threading._shutdown = _shutdown


def _watch_excepthook(note, state):
    """Record what finalizers raise from now on: they report it to sys.excepthook themselves."""
    usual = sys.excepthook

    def excepthook(kind, error, traceback):
        note("excepthook", (), error, traceback)
        return usual(kind, error, traceback)

    sys.excepthook = excepthook

    def restore(_sys=sys):
        if _sys.excepthook is excepthook:
            _sys.excepthook = usual

    state["restore"] = restore


def _process_group(_modules=sys.modules):
    """Return torch's default process group if there is one, as far as it can be told."""
    distributed = _modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None, ""
    world = getattr(getattr(distributed, "group", None), "WORLD", True)
    return id(world), distributed.get_backend()


def _record_group(kind, record, state, _failure=BaseException):
    try:
        group, backend = _process_group()
        # A forked child has its parent's, which is not its to destroy.
        if group is not None and group != state.get("inherited_group"):
            record(kind, backend)
    except _failure:
        pass  # torch is there by halves, or what the program put in its place.


def _make_after_fork(forget, state):
    def after_fork(_failure=BaseException):
        forget()  # The parent's are the parent's to record.
        state["forked"], state["spawned"] = True, False
        try:
            state["inherited_group"] = _process_group()[0]
        except _failure:
            pass

    return after_fork


def _make_last_callback(record, flush, state, os):
    """Return the atexit callback that runs after all others: it was registered before them."""
    import _signal

    def last(_sys=sys, _modules=sys.modules, _failure=BaseException):
        flush()
        known = {}
        try:
            restore = state.pop("restore", None)
            if restore is not None:
                restore()
            _record_group("process-group", record, state)
            _, known["children"] = _read_stat(os)
            known["lost"] = state["lost"]
            unseen = state["replaced"] or not hasattr(_sys, "unraisablehook")
            known["unseen"] = unseen or any(n in _modules for n in _INTERPRETERS)
            known["sigchld_ignored"] = _signal.getsignal(_signal.SIGCHLD) == _signal.SIG_IGN
            known["spawned"] = state["spawned"]
            known["modules"] = [n for n in list(_modules) if n.endswith(_SPEAKERS)]
        except _failure:
            known["unseen"] = True
        state["phase"] = "teardown"
        record("teardown", known)

    return last
