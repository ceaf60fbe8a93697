"""What the programs about the states of torch share; it runs inside of them, on every Python."""

from __future__ import annotations

import sys
import types

import torch_utils


def torch_with(cuda: object) -> None:
    """Put a stand-in for torch into place, with nothing but its ``cuda``."""
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, __version__="0")


def boom(*arguments: object) -> None:
    """Fail, as a broken driver does."""
    raise RuntimeError("driver trouble")


def check(_t=torch_utils) -> None:
    """No check may raise, and none may believe in a device."""
    assert _t.is_cuda_available() is False
    assert _t.get_optimal_device() == "cpu"
    assert _t.safe_cuda_empty_cache() is False
    assert not _t.get_device_info()["cuda_available"]
