"""Read torch's global flags, and restore those that changed."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from torch_utils._memory import query
from torch_utils._runtime import is_shutting_down, loaded_torch

_ATTRIBUTES = (
    *(f"backends.cudnn.{n}" for n in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)
_FUNCTIONS = ("float32_matmul_precision", "default_dtype", "num_threads")  # torch.get_... and set_
_FLAGS = (*_ATTRIBUTES, *_FUNCTIONS, "deterministic_algorithms", "grad_mode", "default_device")
_UNREADABLE = object()


def _read(torch: Any, name: str) -> Any:
    if name in _ATTRIBUTES:
        return attrgetter(name)(torch)
    if name in _FUNCTIONS:
        return getattr(torch, f"get_{name}")()
    if name == "deterministic_algorithms":
        is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), is_warning
    if name == "grad_mode":
        return torch.is_grad_enabled()
    # None if no default device was set: setting "cpu" would slow down every later call.
    is_set = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return torch.get_default_device() if is_set else None


def _set(torch: Any, name: str, value: Any) -> None:
    if name in _ATTRIBUTES:
        path, _, attribute = name.rpartition(".")
        setattr(attrgetter(path)(torch), attribute, value)
    elif name == "deterministic_algorithms":
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    elif name == "grad_mode":
        torch._C._set_grad_enabled(value)
    else:
        getattr(torch, f"set_{name}")(value)


def read_flags() -> dict[str, Any]:
    """Return the value of every flag of this torch by name; empty without torch. Never raises.

    Some builds lack a flag, and torch refuses to mix its two settings of TF32.
    """
    torch = loaded_torch()
    names = _FLAGS if torch is not None else ()
    return {n: query(partial(_read, torch, n), _UNREADABLE, f"flag {n}") for n in names}


def restore_flags(before: dict[str, Any]) -> None:
    """Restore the flags that changed since `read_flags`. Never raises.

    Flags that did not change are not set again. Does nothing during shutdown.
    """
    if is_shutting_down():
        return
    torch, now = loaded_torch(), read_flags()
    for name, value in before.items():
        if _UNREADABLE not in (value, now.get(name, _UNREADABLE)) and value != now[name]:
            query(partial(_set, torch, name, value), None, f"restore flag {name}")
