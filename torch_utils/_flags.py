"""Read torch's global flags, and restore those that changed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch_utils._runtime import DEBUG, is_shutting_down, loaded_torch, log


def _attribute(path: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    """Return a getter and a setter for an attribute below torch."""
    path, _, name = path.rpartition(".")
    owner = attrgetter(path)
    return lambda t: getattr(owner(t), name), lambda t, value: setattr(owner(t), name, value)


def _functions(name: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    """Return a getter and a setter that call ``torch.get_<name>`` and ``torch.set_<name>``."""
    return lambda t: getattr(t, f"get_{name}")(), lambda t, v: getattr(t, f"set_{name}")(v)


_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")
_MATMUL = (
    "allow_tf32",
    *(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")),
)
_FUNCTIONS = ("float32_matmul_precision", "default_dtype", "num_threads")
# The global flags of torch, each with its getter and setter.
FLAGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    **{f"backends.cudnn.{name}": _attribute(f"backends.cudnn.{name}") for name in _CUDNN},
    **{f"backends.cuda.matmul.{n}": _attribute(f"backends.cuda.matmul.{n}") for n in _MATMUL},
    **{name: _functions(name) for name in _FUNCTIONS},
    "deterministic_algorithms": (
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "grad_mode": (
        lambda torch: torch.is_grad_enabled(),
        lambda torch, value: torch._C._set_grad_enabled(value),
    ),
    "default_device": (
        # None if no default device was set: setting "cpu" would slow down every later call.
        lambda torch: (
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            and torch.get_default_device()
        ),
        lambda torch, value: torch.set_default_device(value),
    ),
}


def read_flags() -> dict[str, Any]:
    """Return the value of every flag of this torch by name; empty without torch. Never raises."""
    torch = loaded_torch()
    values: dict[str, Any] = {}
    for name, (read, _) in FLAGS.items() if torch is not None else ():
        try:
            values[name] = read(torch)
        except Exception as error:
            # Some builds lack a flag, and torch refuses to mix its two settings of TF32.
            log(DEBUG, "flag %s cannot be read: %r", name, error)
    return values


def restore_flags(before: dict[str, Any]) -> list[str]:
    """Restore the flags that changed since `read_flags`, and return their names. Never raises.

    Flags that did not change are not set again. Does nothing during shutdown.
    """
    torch = None if is_shutting_down() else loaded_torch()
    restored: list[str] = []
    for name, value in (read_flags() if before and torch is not None else {}).items():
        if name in before and before[name] != value:
            try:
                FLAGS[name][1](torch, before[name])
                restored.append(name)
            except Exception as error:
                # As in reading; one flag must not prevent the restoration of the others.
                log(DEBUG, "flag %s cannot be restored: %r", name, error)
    return restored
