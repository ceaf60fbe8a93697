"""What clean_exit_launch does: run a program as an isolated interpreter would, after the probe."""

import os
import sys

import clean_exit_entry

_HERE = os.path.dirname(__file__)


def _prepare(launcher):
    """Load the probe, and make sys.argv, sys.path and the environment the program's.

    Returns what to run, and whether its first line is to be skipped.
    """
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if hasattr(sys, "orig_argv"):
        sys.orig_argv.remove(launcher)
    skips = sys.argv[1] == "-x"
    del sys.argv[: 1 + skips]
    target = sys.argv[:2]
    clean_exit_entry.enter(os.path.dirname(launcher))
    if target[0] == "-m":
        del sys.argv[1]
        first = os.getcwd()
    elif target[0] == "-c":
        del sys.argv[1]
        first = ""
    else:
        first = os.path.dirname(os.path.realpath(target[0]))
        if _is_package(target[0]):
            first = _absolute(target[0])
            isolated = False  # Python itself puts it there, isolated or not.
    if not isolated:
        sys.path.insert(0, first)
    return target, skips


def _absolute(path):
    """Make a path absolute as Python does that of its program: neither links nor dots go."""
    if path == os.curdir:
        return os.getcwd()
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _load(target, skips, namespace):
    """Return the code to run, and make the namespace as Python itself does."""
    importers, loaders = sys.path_importer_cache, sys.modules["_frozen_importlib_external"]
    importer = importers.pop(namespace["__file__"], None)
    if target[0] == "-c":
        del namespace["__file__"], namespace["__cached__"]
        namespace["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
        return compile(target[1] + "\n", "<string>", "exec")
    path = _absolute(target[0])
    importers[path] = importer
    namespace["__file__"] = path
    with open(path, "rb") as file:
        data = file.read()
    if path.endswith(".pyc") or data[:2] == loaders.MAGIC_NUMBER[:2]:
        namespace["__loader__"] = loaders.SourcelessFileLoader("__main__", path)
        if data[:4] != loaders.MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        import marshal

        return marshal.loads(data[16:])
    namespace["__loader__"] = loaders.SourceFileLoader("__main__", path)
    if skips:
        data = b"\n" + data.partition(b"\n")[2]  # The numbers of the lines stay.
    return compile(data, path, "exec")


def _is_package(path):
    """Say whether it is a folder or an archive with a __main__ module in it."""
    if path == "-c" or (os.path.isfile(path) and path.endswith(".py")):
        return False
    import zipfile

    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _print_as_python(error):
    """Have an error that ends the program printed without the frames of these files."""
    usual = sys.excepthook
    traceback = error.__traceback__
    while traceback is not None and os.path.dirname(traceback.tb_frame.f_code.co_filename) == _HERE:
        traceback = traceback.tb_next

    def once(kind, value, _):
        sys.excepthook = usual
        sys.last_traceback = traceback
        usual(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = once


def run(namespace):
    """Run the program that the command line names, in the namespace of the main module."""
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__doc__=None, __spec__=None)
    target, skips = _prepare(sys.argv[0])
    try:
        if target[0] == "-m":
            import runpy

            runpy._run_module_as_main(target[1])
        elif _is_package(target[0]):
            import runpy

            runpy._run_module_as_main("__main__", alter_argv=False)
        else:
            exec(_load(target, skips, namespace), namespace)
    except SystemExit:
        raise
    except BaseException as error:
        _print_as_python(error)
        raise
