"""Tests of what `import torch_utils` and the exit import."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined"

import pytest

import torch_utils
from tests.support.programs import assert_clean, output_of, run, run_forked


def test_import_loads_little_and_only_registers_with_atexit() -> None:
    program = """
    import atexit, gc, os, signal, sys, threading, warnings
    def state():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook
        lists = list(gc.callbacks), list(warnings.filters), list(sys.meta_path), list(sys.path)
        return [handlers, hooks, lists, dict(os.environ), threading.active_count(), gc.isenabled()]
    def loaded(*names):
        return sorted({"torch", "numpy", "psutil", *names} & set(sys.modules))
    before, callbacks = state(), atexit._ncallbacks()
    import torch_utils
    assert not loaded("asyncio", "logging", "typing"), loaded("asyncio", "logging", "typing")
    for name in dir(torch_utils):
        getattr(torch_utils, name)
    assert not loaded(), loaded()
    assert state() == before
    print(atexit._ncallbacks() - callbacks)
    """
    # What it imports registers too: concurrent.futures and weakref do.
    assert 1 <= int(output_of(program)) <= 3


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(torch_utils.__all__) == sorted(dir(torch_utils))
    for name in torch_utils.__all__:
        assert getattr(torch_utils, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        torch_utils.no_such_name


# Destructors and the end of the program

SAFE = {
    "is_shutting_down": True,
    "is_cuda_available": False,
    "get_optimal_device": "cpu",
    "get_device_info": "dict",
    "safe_cuda_empty_cache": False,
    "memory_snapshot": "MemorySnapshot",
    "release": "CleanupReport",
    "safe_tensor_cleanup": True,
}
"""What the README promises to destructors, and what they get."""

LEAVING = """
import atexit, sys, warnings
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

def helper(): pass
class Last:
    def __init__(self, place):
        self.place, self.tensor = place, [1]
    def __del__(self, tell=tell, safe={name: getattr(torch_utils, name) for name in NAMES}):
        for name, function in safe.items():
            answer = function(*(("tensor", self) if name == "safe_tensor_cleanup" else ()))
            answer = answer if isinstance(answer, (bool, str)) else type(answer).__name__
            tell(f"{self.place} {name} {answer}")
        tell(f"{self.place} helper {helper}")

warnings.simplefilter("ignore", ResourceWarning)
imports.clear()
R("dropped")
tell("destructor:")
kept = R("kept")
scope = SafePyTorchCleanup(R("managed"))
scope.__enter__()
# A module that something keeps is cleared; others only disappear.
cleared = ("__main__", "torch_utils")
sys.kept_modules = [m for n, m in sys.modules.items() if n.partition(".")[0] in cleared]
sys.kept = Last("sys")
sys.modules[Resource.__module__].kept = Last("library")
if "torch" in sys.modules:
    sys.modules["torch"].kept = Last("torch")
atexit.register(imports.clear)
"""


@pytest.mark.parametrize("torch", ["", "import torch"], ids=["without torch", "with torch"])
def test_destructors_and_the_exit_import_nothing_and_checks_still_work(torch: str) -> None:
    program = LEAVING.replace("TORCH", torch).replace("NAMES", str([*SAFE]))
    result = run_forked(program) if torch else run(program)
    assert_clean(result)
    lines = result.stdout.splitlines()
    assert lines[:4] == ["released dropped", "destructor: []", "released managed", "released kept"]
    places = ["sys", "library", *(["torch"] if torch else [])]
    found = [line for line in lines[4:] if " helper " not in line]
    expected = [f"{place} {name} {SAFE[name]} []" for place in places for name in SAFE]
    assert sorted(found) == sorted(expected)
    assert "sys helper None []" in lines  # The control: a naive destructor cannot call it.
