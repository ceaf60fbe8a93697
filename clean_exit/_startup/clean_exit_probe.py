"""The probe of clean-exit: observes the end of the interpreter from inside.

It runs in every checked program, before the program itself. So it imports little, raises nothing
and changes little that the program could notice. Its functions bind everything that they use,
because they are called until the end of the interpreter's teardown.

It appends lines to a file that the checker reads. Each line is the repr() of a tuple: the kind,
the process id, the time (seconds, monotonic clock), the phase, the test that runs and more fields.
The phases are main -> threads (the main module has ended) -> atexit -> teardown.
"""

import os
import sys
from _thread import _local

STACKS_SIGNAL = 62  # A real-time signal that hardly any program uses; the checker sends it.
_LISTED = 20  # errors of one type that are recorded
_FRAMES = 30  # recorded entries of a traceback
_CHARACTERS = 2000  # recorded characters of a message
_COMMAND = 300  # and of the command line
# Python's own packages log the errors that they cannot raise.
_LOGGERS = ("asyncio", "concurrent.futures")
_ERROR_LEVEL = 40
record = None  # Appends an entry; `install` sets it.
_NAMED = ("function", "builtin_function_or_method", "method", "type", "generator", "coroutine")


def install(events, max_shutdown_s):
    """Start recording to the file ``events``, with the stacks of a longer shutdown."""
    import atexit
    import time

    state = {"phase": "main", "audited": False, "forked": False}
    globals()["record"] = record = _make_record(events, state, time.monotonic)
    record("start", " ".join(getattr(sys, "orig_argv", ()))[:_COMMAND], os.getppid())
    open_own_stacks, arm = _offer_stacks(os.path.dirname(events), max_shutdown_s)
    note, forget = _make_note(record)
    hook = _watch_unraisable(note, state)

    def begin_atexit():
        state["phase"] = "atexit"
        record("atexit", _run_delay())
        arm()

    def end_atexit(_record_group=_record_group, _delay=_run_delay):
        if not state["forked"]:
            _record_group(record, state)
        state["phase"] = "teardown"
        record("teardown", _delay())

    def after_fork(_ask=_process_group, _failure=BaseException):
        forget()  # The parent records its own counts.
        state["forked"] = True
        open_own_stacks()
        record("forked")
        try:
            state["inherited_group"] = _ask()[0]
        except _failure:
            pass

    _watch_threads(record, note, state, hook, begin_atexit)
    atexit.register(end_atexit)  # It runs last, because it is registered first.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_fork)
    _watch_shared_memory(record)
    _watch_tracker(record)
    _watch_imports(
        {
            "unittest.runner": _watch_unittest,
            "multiprocessing.synchronize": lambda: _watch_semaphores(record),
        }
    )


def _make_record(path, state, monotonic):
    """Return a function that appends a line."""
    # Non-blocking, because the program may have put a pipe there.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)

    append, write, close, get_pid = os.open, os.write, os.close, os.getpid
    show, failure, running = repr, BaseException, _make_running(_state)

    def record(kind, *fields):
        try:
            entry = (kind, get_pid(), monotonic(), state["phase"], running(), *fields)
            line = (show(entry) + "\n").encode("utf-8", "backslashreplace")
            file = append(path, flags)
            try:
                write(file, line)
            finally:
                close(file)
        except failure:
            pass  # The file cannot be opened any more, or the teardown is nearly complete.

    return record


def _make_running(state):
    """Return a function that names the test that runs, or the task of asyncio, or the thread."""
    from _thread import get_ident

    environ, modules, main, failure = os.environ, sys.modules, get_ident(), BaseException
    outer = environ.get("CLEAN_EXIT_TEST")

    def running():
        try:
            # pytest appends the stage, such as " (call)"; a child inherits the variable.
            if state["test"]:
                return state["test"]
            test = environ.get("PYTEST_CURRENT_TEST", outer)
            if test != outer:
                return test.rpartition(" (")[0]
            asyncio = modules.get("asyncio.events")
            if asyncio is not None and asyncio._get_running_loop() is not None:
                task = modules["asyncio"].current_task()
                if task is not None:
                    return "task " + task.get_name()
            if get_ident() != main:
                return "thread " + modules["threading"]._active[get_ident()].name
        except failure:
            pass  # The teardown is nearly complete, or another thread has no name.
        return ""

    return running


def _run_delay(_open=open, _int=int, _failure=BaseException):
    """Return how long this process had to wait for a processor, in nanoseconds."""
    try:
        with _open("/proc/self/schedstat") as file:
            return _int(file.read().split()[1])
    except _failure:
        return 0  # Not Linux.


def _offer_stacks(folder, max_shutdown_s):
    """Make faulthandler write all stacks after a crash, a slow shutdown or the checker's signal.

    Returns functions that give a forked child its own file, and start the time of the shutdown.
    faulthandler waits in a thread that needs no interpreter.
    """
    number = identity = None
    is_enabled = False

    def is_ours():
        try:
            return os.fstat(number)[1:3] == identity
        except (OSError, TypeError):  # The program has closed it, or it is not open yet.
            return False

    def open_own(_failure=Exception):
        nonlocal number, identity
        try:
            file = os.open(own_path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                chosen = number if is_ours() else _free_number()
                os.dup2(file, chosen, inheritable=False)
            finally:
                os.close(file)
            identity = os.fstat(chosen)[1:3]
            if chosen != number:
                number = chosen
                offer()
        except _failure:
            pass  # Too few open files, another root or another user: there are no stacks.

    def own_path():
        return os.path.join(folder, "stacks-%d" % os.getpid())

    def offer():
        nonlocal is_enabled
        if is_enabled or not faulthandler.is_enabled():
            faulthandler.enable(file=number)
            is_enabled = True
        faulthandler.register(STACKS_SIGNAL, file=number, all_threads=True)  # Not on macOS.

    def dump_traceback_later(*args, **options):
        nonlocal is_free
        is_free = False  # There is one timer, which the program uses itself.
        return later(*args, **options)

    def arm(_failure=Exception):
        try:
            if is_free and is_ours():
                later(max_shutdown_s, file=number)
        except _failure:
            pass  # The time is too long for the timer.

    try:
        import faulthandler

        # A sub-interpreter shares the timer, but its end is not the end of the process.
        is_free = not os.path.exists(own_path())
        later = faulthandler.dump_traceback_later
        faulthandler.dump_traceback_later = dump_traceback_later
        open_own()
    except Exception:  # This Python has no faulthandler.
        return (lambda: None,) * 2
    return open_own, arm


def _free_number():
    """Return a number for the probe's file that the program's files get last."""
    for number in range(min(4096, os.sysconf("SC_OPEN_MAX")) - 1, 99, -1):
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


def _make_note(record):
    """Return functions that record an error, and that forget the numbers of errors so far."""
    counts = {}
    most = _LISTED

    def note(kind, context, error, traceback, _describe=_describe, _failure=BaseException):
        try:
            name, message, places = _describe(error, traceback)
            key = (kind, name)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= most:
                record(kind, *context, name, message, places)
        except _failure:
            pass  # A hook that raises would change the program's behaviour.

    return note, counts.clear


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
    """Record unraisable errors by an audit hook, for programs that replaced sys.unraisablehook.

    It is added after the main module, because it slows down each id() and open().
    """

    def hook(event, args, _event="sys.unraisablehook"):
        if event == _event:
            _note(note, args[1])

    try:
        sys.addaudithook(hook)
        state["audited"] = True
    except Exception:  # Another audit hook forbids it.
        pass


def _watch_threads(record, note, state, hook, begin_atexit):
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
        state["phase"] = "threads"
        record("main-ended")
        if getattr(sys, "unraisablehook", None) is not hook and not state["audited"]:
            _listen(note, state)
        if state["forked"]:  # multiprocessing may end it by os._exit, without atexit.
            _record_group(record, state)
        try:
            _watch_logs(record, note)
        except Exception:  # The program has a module or a logger of another kind.
            pass
        try:
            return join()
        finally:
            begin_atexit()

    threading._shutdown = _shutdown


def _watch_logs(record, note):
    """Record messages that logging cannot write, and errors that Python itself only logs."""
    logging = sys.modules.get("logging")
    if logging is None:
        return
    usual = logging.Handler.handleError

    def handle_error(self, entry, _sys=sys, _failure=BaseException):
        try:
            error = _sys.exc_info()[1]
            # Else it prints nothing.
            if logging.raiseExceptions and _sys.stderr and error is not None:
                note("logging", (entry.name,), error, error.__traceback__)
        except _failure:
            pass
        return usual(self, entry)

    def note_logged(entry, _level=_ERROR_LEVEL, _most=_CHARACTERS, _failure=BaseException):
        try:
            if entry.levelno >= _level:
                error = entry.exc_info and entry.exc_info[1]
                record("logged", entry.getMessage()[:_most], repr(error)[:_most] if error else "")
        except _failure:
            pass
        return True

    logging.Handler.handleError = handle_error
    for name in _LOGGERS:
        logger = logging.root.manager.loggerDict.get(name)
        if hasattr(logger, "addFilter"):  # A filter leaves no frame on the stack of the handlers.
            logger.addFilter(note_logged)


def _process_group(_modules=sys.modules):
    """Return the id and the backend of torch's default process group; None without a group."""
    distributed = _modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None, ""
    world = getattr(getattr(distributed, "group", None), "WORLD", True)
    return id(world), distributed.get_backend()


def _record_group(record, state, _ask=_process_group, _failure=BaseException):
    try:
        group, backend = _ask()
        # A forked child does not have to destroy the group of its parent.
        if group is not None and group != state.get("inherited_group"):
            record("process-group", backend)
    except _failure:
        pass  # torch is only partly imported, or the program has replaced it.


def _watch_imports(watchers):
    """Call a function when one of some modules is about to be imported."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None, _failure=Exception):
            try:
                watchers.pop(name, int)()
            except _failure:
                pass  # A module of another kind with this name.

    for name in [name for name in watchers if name in sys.modules]:  # By a .pth file.
        Finder.find_spec(name)
    sys.meta_path.insert(0, Finder)


# Sessions of tests. The plugin of pytest calls these functions as well.


def begin_session():
    """Record that a session of tests begins, unless it is a part of another one."""
    _session.depth = getattr(_session, "depth", 0) + 1
    if _session.depth == 1:
        record("session", 1)


def end_session(failed):
    """Record that a session of tests ends, and what has failed: tests, files or classes."""
    _session.depth -= 1
    if _session.depth == 0:
        for name in failed:
            record("failed", name)
        record("session", -1)


def begin_test(name):
    """Record that a test begins; return the name of the one around it, for `end_test`."""
    before, _state["test"] = _state["test"], name
    record("test", name)
    return before


def end_test(before):
    """Forget a test."""
    _state["test"] = before


_session = _local()  # of a thread
_state = {"test": ""}


def _watch_unittest():
    """Record the tests and the sessions of unittest, whatever runs them."""
    from functools import wraps
    from unittest.case import TestCase
    from unittest.suite import TestSuite

    def failures(result):
        """Return the ids of what has failed."""
        entries = [
            entry[0] for name in ("failures", "errors") for entry in getattr(result, name, ())
        ]
        tests = [*entries, *getattr(result, "unexpectedSuccesses", ())]
        names = [test.id() if hasattr(test, "id") else str(test) for test in tests]
        is_bad = result is not None and not names and not result.wasSuccessful()
        return names + ["unittest"] * is_bad

    def watch(cls, _failure=Exception):
        usual = cls.run

        @wraps(usual)
        def run(self, *args, **options):
            before = ""
            try:
                begin_session()
                before = _state["test"]
                if cls is TestCase and not before:  # Else it is a part of a test, as in pytest.
                    begin_test(self.id())
            except _failure:
                pass  # The test has a method of its own that fails.
            result = args[0] if args else options.get("result")
            try:
                found = usual(self, *args, **options)
                result = result if result is not None else found
                return found
            finally:
                names = []
                try:
                    end_test(before)
                    names = failures(result) if _session.depth == 1 else []
                except _failure:
                    pass
                end_session(names)

        cls.run = run

    watch(TestSuite)
    watch(TestCase)


def _watch_semaphores(record):
    """Record the named semaphores that exist, to tell which test has made one that leaks."""
    from multiprocessing import resource_tracker

    def wrap(usual, kind):
        def call(name, rtype):
            if rtype == "semaphore":
                record(kind, name)
            return usual(name, rtype)

        return call

    resource_tracker.register = wrap(resource_tracker.register, "semaphore")
    resource_tracker.unregister = wrap(resource_tracker.unregister, "semaphore-removed")


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
