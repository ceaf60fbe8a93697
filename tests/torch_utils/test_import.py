"""Importing torch_utils loads neither torch nor numpy, and the test that says so can fail."""

from __future__ import annotations

import pytest

import torch_utils
from programs import assert_clean, run

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


def test_function_is_not_hidden_by_its_module() -> None:
    """``release`` stays the function although a module has the same name."""
    import torch_utils.release

    assert callable(torch_utils.release)
    from torch_utils import release

    assert release is torch_utils.release
