"""What the probe sees of a program's children, and of what it shares with them.

As in clean_exit_probe: nothing here raises, or changes what the program can see.
"""


def follow(events, here, record, state, os, sys):
    """Have the Python interpreters that this one starts load the probe as well.

    Only the child finds the probe in its environment, and takes it out before its program runs.
    A child that ignores its environment is left alone: it could not take it out.
    """
    try:
        import _posixsubprocess  # under subprocess, and multiprocessing by spawn and forkserver
    except ImportError:
        return
    usual = _posixsubprocess.fork_exec
    add_probe = _make_adding(events, here, os, sys)

    def fork_exec(args, executables, *rest, _failure=Exception):
        state["spawned"] = True
        watch_crashes(record, sys)
        try:
            args, executables = list(args), list(executables)
            changed = add_probe(executables[0], args, rest[3])
            if changed is not None:
                rest = (*rest[:3], [n + b"=" + v for n, v in changed], *rest[4:])
        except _failure:
            pass  # Arguments that make no sense: the call itself says what is wrong with them.
        return usual(args, executables, *rest)

    _posixsubprocess.fork_exec = fork_exec
    loaded = sys.modules.get("subprocess")
    if getattr(loaded, "_fork_exec", None) is usual:
        loaded._fork_exec = fork_exec
    if hasattr(os, "posix_spawn"):  # What subprocess prefers from Python 3.13 on.
        os.posix_spawn = _make_spawn(os.posix_spawn, add_probe, record, state, sys)
    execute = os.execve
    for name in ("execv", "execve"):
        setattr(os, name, _make_execution(getattr(os, name), execute, add_probe, record))
    os.supports_fd.add(os.execve)


def _make_adding(events, here, os, sys):
    """Return a function that adds the probe to the environment of what will be a Python.

    It takes a list of bytes as subprocess does, a mapping as os does, and None for what this
    process has; it returns names with values, or None for what is to be left alone.
    """
    variables, encode, may, readable = os.environb, os.fsencode, os.access, os.R_OK | os.X_OK
    own = encode(os.path.basename(sys.executable or "python"))

    def add_probe(path, argv, environment):
        if not _is_python(encode(path), own) or _is_isolated([encode(a) for a in argv]):
            return None
        # Another user, or one behind another root, could not take out what it did not find.
        if not may(here, readable, effective_ids=True):
            return None
        given = variables if environment is None else environment
        if type(given) is list:
            pairs = [entry.partition(b"=")[::2] for entry in given]
        else:
            pairs = given.items()
        return _with_probe([(encode(n), v) for n, v in pairs], events, here, encode)

    return add_probe


def _make_spawn(usual, add_probe, record, state, sys):
    def posix_spawn(path, argv, env, /, *rest, _failure=Exception, **options):
        state["spawned"] = True
        watch_crashes(record, sys)
        try:
            argv = list(argv)
            changed = add_probe(path, argv, env)
            env = env if changed is None else dict(changed)
        except _failure:
            pass  # As above.
        return usual(path, argv, env, *rest, **options)

    return posix_spawn


def _make_execution(usual, execute, add_probe, record):
    """Have the Python that a process becomes load the probe: so pty, say, starts programs.

    Called as a function is, but a class: what `usual` raises, called from C as its __init__, has
    no frame of these files in its traceback. Where it comes to that there is no such Python.
    """
    takes_env = usual is execute

    class Execution:
        def __new__(cls, path=None, argv=None, env=None, *_, _failure=Exception, **__):
            try:
                changed = add_probe(path, argv, env)
                if changed is not None and takes_env is (env is not None):
                    record("executed")
                    execute(path, argv, dict(changed))
            except _failure:
                pass
            return object.__new__(cls)

        __init__ = usual

    Execution.__name__ = Execution.__qualname__ = usual.__name__
    Execution.__module__, Execution.__doc__ = usual.__module__, usual.__doc__
    return Execution


def _is_python(path, own):
    name = path.rpartition(b"/")[2]
    rest = name[6:].replace(b".", b"")
    return name == own or (name.startswith(b"python") and (not rest or rest.isdigit()))


def _is_isolated(args):
    skip = False
    for arg in args[1:]:
        if skip:
            skip = False
            continue
        if not arg.startswith(b"-") or arg == b"-":
            return False
        if arg.startswith(b"--"):
            continue
        for place, letter in enumerate(arg.decode("latin-1")[1:], 2):
            if letter in "cm":
                return False
            if letter in "IES":
                return True
            if letter in "WX":
                skip = place == len(arg)
                break
    return False


def _with_probe(pairs, events, here, encode):
    known = dict(pairs)
    if b"CLEAN_EXIT_EVENTS" in known:
        return None  # Another checker's program.
    changed = [pair for pair in pairs if pair[0] != b"PYTHONPATH"]
    changed.append((b"CLEAN_EXIT_EVENTS", encode(events)))
    path = [encode(here)]
    if b"PYTHONPATH" in known:
        original = encode(known[b"PYTHONPATH"])
        changed.append((b"CLEAN_EXIT_PYTHONPATH", original))
        path += [original] if original else []  # An empty entry would be the current folder.
    changed.append((b"PYTHONPATH", b":".join(path)))
    return changed


# ILL, ABRT, BUS, FPE, SEGV: by these a program crashes; the others are sent.
_CRASHES = (-4, -6, -7, -8, -11)


class _Returncode:
    """Stands for the attribute of a class of child processes, and sees it set.

    It has no __get__, so that it is read from the object as ever; and unlike a method around the
    usual one it never is in a traceback.
    """

    def __init__(self, record):
        self._record = record

    def __set__(self, child, value, _crashes=_CRASHES, _type=type, _int=int, _failure=Exception):
        child.__dict__["returncode"] = value
        try:
            if _type(value) is _int and value in _crashes:
                self._record("child-crashed", child.pid, -value)
        except _failure:
            pass

    def __delete__(self, child):
        del child.__dict__["returncode"]


def watch_crashes(record, sys):
    """Record which children crash, as the modules that start them are told.

    Called before each start: by then they are loaded, and it costs nothing to look again.
    """
    for name in ("subprocess", "multiprocessing.popen_fork"):
        kind = getattr(sys.modules.get(name), "Popen", None)
        if kind is not None and "returncode" not in vars(kind):
            kind.returncode = _Returncode(record)


def watch_tracker(record, sys):
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


def watch_shared_memory(record):
    """Record which blocks of shared memory are made and removed."""
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
