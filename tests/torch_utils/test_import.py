"""Importing torch_utils loads neither torch nor numpy, and the test that says so can fail."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import pkgutil
import pydoc
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_utils
from programs import assert_clean, run, run_forked
from torch_utils._runtime import early_bound

CHECK = """
import sys
{}
loaded = sorted({{"torch", "numpy", "psutil", "asyncio", "logging", "typing"}} & set(sys.modules))
assert not loaded, f"loaded: {{loaded}}"
"""


def test_import_loads_nothing() -> None:
    """The package itself, and its exit registration, need only a few builtin modules."""
    assert_clean(run(CHECK.format("import torch_utils")))


def test_lazy_names_load_no_torch() -> None:
    """Using every name still imports neither torch nor numpy; only a question does."""
    program = """
    import sys
    import torch_utils
    for name in torch_utils.__all__:
        getattr(torch_utils, name)
    torch_utils.memory_snapshot(); torch_utils.safe_cuda_empty_cache(); torch_utils.release([])
    assert not {"torch", "numpy", "psutil"} & set(sys.modules)
    """
    assert_clean(run(program))


def test_check_can_fail() -> None:
    """Negative control: the same check on a program that does import numpy."""
    result = run(CHECK.format("import torch_utils, numpy"))
    assert "loaded: " in result.stderr
    with pytest.raises(AssertionError):
        assert_clean(result)


def test_public_names() -> None:
    """Each public name exists, is documented, and is in its package's list."""
    assert sorted(torch_utils.__all__) == sorted(dir(torch_utils))
    for name in torch_utils.__all__:
        assert getattr(torch_utils, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        torch_utils.no_such_name


def names_for_type_checkers(source: str) -> dict[str, str]:
    """Read the imports under ``if TYPE_CHECKING``: each name, and the module that it is from."""
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.asname: node.module.removeprefix("torch_utils.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name
    }


def test_type_checkers_see_the_same_names() -> None:
    """The list that type checkers read is the one by which names are loaded."""
    source = Path(torch_utils.__file__).read_text()
    assert names_for_type_checkers(source) == torch_utils._MODULE_OF
    moved = source.replace(
        "from torch_utils.oom import is_out", "from torch_utils.exit import is_out"
    )
    missing = source.replace("import Resource as Resource", "import Resource")
    for wrong in (moved, missing):  # The control: either mistake is noticed.
        assert wrong != source
        assert names_for_type_checkers(wrong) != torch_utils._MODULE_OF


def public_functions() -> dict[str, Any]:
    """Collect the public functions, and the public methods of the public classes."""
    found = {}
    for name in torch_utils.__all__:
        value = getattr(torch_utils, name)
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isfunction)
            found |= {f"{name}.{m}": f for m, f in methods if not m.startswith("_")}
            if "__init__" in vars(value):
                found[f"{name}.__init__"] = value.__init__
        else:
            found[name] = value
    return found


def private_parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name.startswith("_")]


def test_signatures_are_public() -> None:
    """No public function has a parameter that is none of its caller's business."""
    functions = public_functions()
    assert len(functions) > 20
    assert not {
        name: private_parameters(f) for name, f in functions.items() if private_parameters(f)
    }
    assert private_parameters(lambda *, _modules=sys.modules: None) == ["_modules"]


def test_help_is_short() -> None:
    """Help on a function is its documentation, and none of what it binds."""
    for name, function in public_functions().items():
        assert len(pydoc.render_doc(function)) < 6000, name


def early_bound_functions() -> dict[str, Any]:
    """Collect what `early_bound` has made, in all of the package's modules."""
    found = {}
    for info in pkgutil.iter_modules(torch_utils.__path__):
        if info.name.startswith(("pytest_", "clean_exit")):
            continue
        try:
            module = importlib.import_module(f"torch_utils.{info.name}")
        except ImportError as error:
            if "pip install" not in str(error):
                raise
            continue  # It needs an extra, which is not installed.
        for owner in (module, *(v for v in vars(module).values() if inspect.isclass(v))):
            for value in list(vars(owner).values()):
                if inspect.isfunction(value) and maker(value) == "early_bound":
                    found[f"{info.name}.{value.__qualname__}"] = value
    return found


def maker(function: Any) -> str:
    """Name what made a function: its globals are its module's own, or `early_bound`'s."""
    wrapped = getattr(function, "__wrapped__", None)
    same = getattr(wrapped, "__code__", None) is function.__code__
    return "early_bound" if same and function.__globals__ is not wrapped.__globals__ else ""


def unbound_names(function: Any) -> set[str]:
    """List the globals that a function loads and cannot find."""
    loaded = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    return loaded - function.__globals__.keys() - vars(builtins).keys()


def test_early_bound_functions_have_all_they_name() -> None:
    """The decorator stands below everything that its function uses."""
    functions = early_bound_functions()
    assert {f.rpartition(".")[2] for f in functions} >= SAFE
    assert not {name: unbound_names(f) for name, f in functions.items() if unbound_names(f)}

    @early_bound
    def too_early() -> None:
        defined_later()

    assert unbound_names(too_early) == {"defined_later"}  # The control.


SAFE = {
    *("is_shutting_down", "is_cuda_available", "get_optimal_device", "get_device_info"),
    *("safe_cuda_empty_cache", "memory_snapshot", "release", "safe_tensor_cleanup"),
}
"""What the README promises to destructors."""


@pytest.mark.parametrize("torch", ["", "import torch"], ids=["without torch", "with torch"])
def test_safe_functions_without_their_modules(torch: str) -> None:
    """What destructors call works when teardown has set all globals of the package to None."""
    program = f"""
    import sys
    {torch}
    import torch_utils
    from torch_utils import _runtime
    from torch_utils.resource import Resource
    safe = {{name: getattr(torch_utils, name) for name in {sorted(SAFE)}}}
    class Kept(Resource):
        def _release(self): print("released")
    kept = Kept()
    def naive(): return is_shutting_down()
    torch_utils.exit.naive = naive = type(naive)(naive.__code__, vars(torch_utils._runtime))
    assert naive() is False
    _runtime.PHASE.exiting = True
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch_utils":
            for key in [key for key in vars(module) if key != "__builtins__"]:
                vars(module)[key] = None
    class Owner: tensor = [1]
    owner = Owner()
    for name, function in safe.items():
        print(name, function("tensor", owner) if name == "safe_tensor_cleanup" else function())
    assert owner.tensor is None
    del kept
    try:
        naive()
    except TypeError as error:
        print("naive:", error)
    """
    result = run_forked(program) if torch else run(program)
    answers = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    assert answers["is_shutting_down"] == "True", str(result)
    assert answers["is_cuda_available"] == "False"
    assert answers["get_optimal_device"] == "cpu"
    assert answers["safe_cuda_empty_cache"] == "False"
    assert answers["safe_tensor_cleanup"] == "True"
    assert set(answers) == {*SAFE, "naive:"}, str(result)
    assert "released" in result.stdout.splitlines(), str(result)
    assert "NoneType" in answers["naive:"]  # The control: this is what it is all about.


def test_function_is_not_hidden_by_its_module() -> None:
    """``release`` stays the function although a module has the same name."""
    import torch_utils.release

    assert callable(torch_utils.release)
    from torch_utils import release

    assert release is torch_utils.release
