"""Tests of what `import torch_utils` and the exit import."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, var-annotated"

from __future__ import annotations

import pkgutil

import pytest

import torch_utils
from tests.support.programs import assert_clean, run, run_forked

CHECK = """
import sys
{}
loaded = sorted({{"torch", "numpy", "psutil", "asyncio", "logging", "typing"}} & set(sys.modules))
assert not loaded, f"loaded: {{loaded}}"
"""


def test_import_loads_neither_torch_nor_numpy() -> None:
    assert_clean(run(CHECK.format("import torch_utils")))
    result = run(CHECK.format("import torch_utils, numpy"))  # The control.
    assert "loaded: " in result.stderr


def test_import_only_registers_with_atexit() -> None:
    program = """
    import atexit, gc, os, signal, sys, threading, warnings
    def state():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook
        lists = list(gc.callbacks), list(warnings.filters), list(sys.meta_path), list(sys.path)
        return [handlers, hooks, lists, dict(os.environ), threading.active_count(), gc.isenabled()]
    before, callbacks = state(), atexit._ncallbacks()
    import torch_utils
    for name in dir(torch_utils):
        getattr(torch_utils, name)
    assert state() == before
    print(atexit._ncallbacks() - callbacks)
    """
    result = run(program)
    assert_clean(result)
    # What it imports registers too: concurrent.futures and weakref do.
    assert 1 <= int(result.stdout) <= 3


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(torch_utils.__all__) == sorted(dir(torch_utils))
    for name in torch_utils.__all__:
        assert getattr(torch_utils, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        torch_utils.no_such_name


def test_no_module_has_the_name_of_a_public_function() -> None:
    """An import of the module would hide the function."""
    modules = {info.name for info in pkgutil.iter_modules(torch_utils.__path__)}
    assert "_cleanup" in modules
    assert modules.isdisjoint(torch_utils.__all__)


# Destructors and the end of the program

LEAVING = """
import atexit, gc, sys
TORCH
import torch_utils
from torch_utils import Resource, SafePyTorchCleanup

class R(Resource):
    def __init__(self, name):
        self.name = name
    def _release(self):
        print("released", self.name, flush=True)

imports = []
sys.addaudithook(lambda event, details: imports.append(details[0]) if event == "import" else None)
def tell(what, imports=imports, write=sys.__stdout__.write, flush=sys.__stdout__.flush):
    write(f"{what} {imports}\\n")
    flush()
    imports.clear()

with SafePyTorchCleanup(R("warm-up")) as scope:
    scope.callback(print, "callback", flush=True)
import warnings
warnings.simplefilter("ignore", ResourceWarning)
imports.clear()
dropped = R("dropped")
del dropped
gc.collect()
tell("destructor:")
kept = R("kept")
scope = SafePyTorchCleanup(R("managed"))
scope.__enter__()
class Last:
    def __del__(self, tell=tell):
        tell("teardown:")
sys.last = Last()
atexit.register(imports.clear)
"""


@pytest.mark.parametrize("torch", ["", "import torch"], ids=["without torch", "with torch"])
def test_nothing_is_imported_in_destructors_and_at_exit(torch: str) -> None:
    start = run_forked if torch else run
    result = start(LEAVING.replace("TORCH", torch))
    assert_clean(result)
    lines = result.stdout.splitlines()
    assert lines[2:4] == ["released dropped", "destructor: []"]
    assert lines[4:] == ["released managed", "released kept", "teardown: []"]


SAFE = {
    "is_shutting_down": "True",
    "is_cuda_available": "False",
    "get_optimal_device": "cpu",
    "get_device_info": "dict",
    "safe_cuda_empty_cache": "False",
    "memory_snapshot": "MemorySnapshot",
    "release": "CleanupReport",
    "safe_tensor_cleanup": "True",
    "tensor": "None",  # What that leaves.
}
"""What the README promises to destructors, and what they get."""


@pytest.mark.parametrize("torch", ["", "import torch"], ids=["without torch", "with torch"])
def test_checks_work_after_modules_were_torn_down(torch: str) -> None:
    names = [name for name in SAFE if name != "tensor"]
    program = f"""
    import sys
    {torch}
    import torch_utils
    def helper(): pass
    class Last:
        def __init__(self, name): self.name = name
        def __del__(self, safe={{name: getattr(torch_utils, name) for name in {names}}},
                    write=sys.__stdout__.write, flush=sys.__stdout__.flush):
            self.tensor = [1]
            for name, function in safe.items():
                arguments = ("tensor", self) if name == "safe_tensor_cleanup" else ()
                answer = function(*arguments)
                answer = answer if isinstance(answer, (bool, str)) else type(answer).__name__
                write(f"{{self.name}} {{name}} {{answer}}\\n")
            write(f"{{self.name}} tensor {{self.tensor}}\\n")
            try:
                helper()
            except Exception as error:
                write(f"{{self.name}} naive {{type(error).__name__}}\\n")
            flush()
    for name in dir(torch_utils):
        getattr(torch_utils, name)
    # A module that something keeps is cleared; others only disappear.
    cleared = ("__main__", "torch_utils")
    sys.kept_modules = [m for n, m in sys.modules.items() if n.partition(".")[0] in cleared]
    sys.kept = Last("sys")
    sys.modules[torch_utils.Resource.__module__].kept = Last("library")
    {"torch.kept = Last('torch')" if torch else ""}
    """
    result = run_forked(program) if torch else run(program)
    assert_clean(result)
    answers: dict[str, dict[str, str]] = {}
    for line in result.stdout.splitlines():
        place, name, answer = line.split(" ", 2)
        answers.setdefault(place, {})[name] = answer
    assert set(answers) == {"sys", "library", *(["torch"] if torch else [])}
    assert "naive" in answers["sys"]  # The control: this is what it is all about.
    for given in answers.values():
        given.pop("naive", None)
        assert given == SAFE
