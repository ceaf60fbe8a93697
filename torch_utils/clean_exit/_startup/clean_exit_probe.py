"""The probe of clean-exit: what only the program's own interpreter can see of its end.

Runs inside of whatever program is checked, before it, so it has to be small, to need little, to
raise nothing and to change nothing that the program could notice. All that its functions use is
bound to them: they are called until the interpreter has been taken apart.

It appends lines to a file that the checker reads, each the repr() of a tuple that begins with a
kind, the process's id, the time (seconds, monotonic) and the phase:
main -> threads (main module ended) -> atexit -> teardown.
"""

import sys

STACKS_SIGNAL = 62  # A real-time signal that hardly any program uses; the checker sends it.
_STACKS_FD = 250  # Far from the numbers that a program's own files get.
_FRAMES = 30  # entries of a traceback that are recorded
_LETTERS = 2000  # of a message


def install(path):
    """Begin to record into ``path``."""
    import atexit
    import os
    import time

    state = {"phase": "main"}
    record = _make_record(path, state, os, time.monotonic)
    _remember_stacks(path, os)
    sys.addaudithook(_make_audit_hook(record, state))
    _watch_threads(record, state)
    atexit.register(_make_last_callback(record, state))
    version = "%d.%d.%d" % sys.version_info[:3]
    record("start", version, os.path.basename(sys.executable or ""))


def _make_record(path, state, os, monotonic):
    """Return a function that appends one line, opening the file anew each time.

    A program may close all files that it did not open, as daemons do.
    """
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)

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
            file = _open(path, flags)
            try:
                _write(file, (_repr(entry) + "\n").encode("utf-8", "backslashreplace"))
            finally:
                _close(file)
        except _failure:
            # The file is out of reach (another root, another user) or the interpreter is nearly
            # gone; the checker has other evidence.
            pass

    return record


def _remember_stacks(path, os):
    """Have the stacks of all threads written if the program crashes, or when it is asked."""
    try:
        import faulthandler

        file = os.open(path + ".stacks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, _STACKS_FD, inheritable=False)
        os.close(file)
        faulthandler.register(STACKS_SIGNAL, file=_STACKS_FD, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=_STACKS_FD)
    except Exception:  # A Python without faulthandler, a small limit of open files: no stacks.
        pass


def _make_audit_hook(record, state):
    unraisable_event = "sys.unraisablehook"
    starts = ("cpython.run_command", "cpython.run_file", "cpython.run_module", "cpython.run_stdin")
    spawns = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")

    watch_shared_memory = _watch_shared_memory

    def hook(
        event,
        args,
        _modules=sys.modules,
        _describe=_describe_error,
        _name=_name_object,
        _failure=BaseException,
    ):
        if event == unraisable_event:
            try:
                info = args[1]
                what = _name(info.object)
                said = info.err_msg or "Exception ignored in"
                record("unraisable", said, what, *_describe(info.exc_value, info.exc_traceback))
            except _failure:
                pass  # An audit hook that raises would change what the program does.
        elif event in starts:
            stub = _modules.get("sitecustomize")
            if getattr(stub, "_own", None) is stub:
                _modules.pop("sitecustomize", None)
        elif event == "import" and args[0] == "_posixshmem":
            watch_shared_memory(record, state)
        elif event in spawns and not state.get("spawned"):
            state["spawned"] = True
            record("spawned", event)

    return hook


def _name_object(thing):
    """Name an object without running any of its code."""
    if thing is None:
        return ""
    kind = type(thing)
    name = thing.__qualname__ if kind.__name__ in _NAMED else ""
    return "%s.%s %s" % (kind.__module__, kind.__qualname__, name)


_NAMED = ("function", "builtin_function_or_method", "method", "type", "generator", "coroutine")


def _describe_error(
    error,
    traceback,
    _type=type,
    _str=str,
    _failure=BaseException,
    _most=_FRAMES,
    _letters=_LETTERS,
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


def _watch_threads(record, state):
    """Record errors that end threads, and when the main module has ended."""
    import threading

    usual = threading.excepthook

    def excepthook(args, _describe=_describe_error, _exit=SystemExit, _failure=BaseException):
        try:
            if args.exc_type is not _exit:
                name = args.thread.name if args.thread is not None else ""
                record("thread", name, *_describe(args.exc_value, args.exc_traceback))
        except _failure:
            pass
        return usual(args)

    threading.excepthook = threading.__excepthook__ = excepthook
    join = threading._shutdown

    def _shutdown():
        # Called by the interpreter when the main module has ended, however it did.
        state["phase"] = "threads"
        record("main-ended")
        _watch_excepthook(record, state)
        try:
            return join()
        finally:
            state["phase"] = "atexit"
            record("atexit")

    threading._shutdown = _shutdown


def _watch_shared_memory(record, state):
    """Record which blocks of shared memory are made and removed.

    Called when the module that does it is about to be imported: that is done here, and then
    found done by who asked for it.
    """
    if state.get("shared_memory"):
        return
    state["shared_memory"] = True
    try:
        import _posixshmem
        from os import O_CREAT

        make, remove = _posixshmem.shm_open, _posixshmem.shm_unlink
    except Exception:  # Not on this system; the program's own import says so.
        return

    def shm_open(path, flags, *args, **options):
        made = make(path, flags, *args, **options)
        if flags & O_CREAT:
            record("shared-memory", path)
        return made

    def shm_unlink(path):
        record("shared-memory-removed", path)
        return remove(path)

    _posixshmem.shm_open, _posixshmem.shm_unlink = shm_open, shm_unlink


def _watch_excepthook(record, state):
    """Record what finalizers raise from now on: they report it to sys.excepthook themselves."""
    usual = sys.excepthook

    def excepthook(kind, error, traceback, _describe=_describe_error, _failure=BaseException):
        try:
            record("excepthook", *_describe(error, traceback))
        except _failure:
            pass
        return usual(kind, error, traceback)

    sys.excepthook = excepthook

    def restore(_sys=sys):
        if _sys.excepthook is excepthook:
            _sys.excepthook = usual

    state["restore"] = restore


def _make_last_callback(record, state):
    """Return the atexit callback that runs after all others: it was registered before them."""

    def last(_modules=sys.modules, _failure=BaseException):
        try:
            restore = state.pop("restore", None)
            if restore is not None:
                restore()
            distributed = _modules.get("torch.distributed")
            if distributed is not None and distributed.is_initialized():
                record("process-group", distributed.get_backend())
        except _failure:
            pass  # torch is there by halves, or what the program put in its place.
        state["phase"] = "teardown"
        record("teardown")

    return last
