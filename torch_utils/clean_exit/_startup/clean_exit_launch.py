"""Start a program whose interpreter ignores the environment (-I, -E) or site (-S), with the probe.

Called as ``python -I clean_exit_launch.py FILE|-c CODE|-m MODULE ARGUMENTS...``. The program
runs as ``__main__`` in this very module's namespace, which is what Python itself does, so that
its variables live exactly as long as they would.
"""

import sys


def _prepare():
    """Load the probe, and make sys.argv, sys.path and the environment the program's."""
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    sys.path.insert(0, here)
    import clean_exit_entry

    clean_exit_entry.enter(here)
    arguments = sys.argv[1:]
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        first = os.getcwd()
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        first = ""
    else:
        sys.argv[:] = arguments
        first = os.path.dirname(os.path.realpath(arguments[0]))
        if _is_package(arguments[0]):
            first = os.path.abspath(arguments[0])
            isolated = False  # Python itself puts it there, isolated or not.
    if not isolated:
        sys.path.insert(0, first)
    return arguments[:2]


def _load(target):
    """Return the code to run, and the absolute path of its file, as Python itself has it."""
    import os

    importers = sys.path_importer_cache
    importer = importers.pop(os.path.abspath(__file__), None)
    if target[0] == "-c":
        return compile(target[1] + "\n", "<string>", "exec"), None
    path = os.path.abspath(target[0])
    importers[path] = importer
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec"), path


def _is_package(path):
    """Say whether it is a folder or an archive with a __main__ module in it."""
    import os

    if path == "-c" or (os.path.isfile(path) and path.endswith(".py")):
        return False
    import zipfile

    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _run_package(run):
    run("__main__", alter_argv=False)


def _run(namespace):
    target = _prepare()
    report = sys  # The names of this module are the program's before it begins.
    if target[0] == "-m":
        import runpy

        run, argument = runpy._run_module_as_main, target[1]
    elif _is_package(target[0]):
        import runpy

        run, argument = _run_package, runpy._run_module_as_main
    else:
        argument, path = _load(target)
        for name in [name for name in namespace if not name.startswith("__")]:
            del namespace[name]
        namespace.update(__doc__=None, __spec__=None)
        namespace["__file__"] = path
        if path is None:
            del namespace["__file__"], namespace["__cached__"]
        run = exec
    try:
        run(argument, namespace) if run is exec else run(argument)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # As the interpreter would print it: without the frames of this file.
        traceback = error.__traceback__.tb_next
        report.last_type, report.last_value = type(error), error
        report.last_traceback = traceback
        report.excepthook(type(error), error.with_traceback(traceback), traceback)
        report.exit(1)


_run(globals())
