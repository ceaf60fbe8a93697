"""torch's global switches: read them all, and put back those that changed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch_utils._runtime import DEBUG, is_shutting_down, loaded_torch, log


def _attribute(path: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    """Return what reads and what sets an attribute below torch."""
    path, _, name = path.rpartition(".")
    owner = attrgetter(path)
    return lambda t: getattr(owner(t), name), lambda t, value: setattr(owner(t), name, value)


def _functions(name: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    """Return what calls ``torch.get_<name>`` and ``torch.set_<name>``."""
    return lambda t: getattr(t, f"get_{name}")(), lambda t, v: getattr(t, f"set_{name}")(v)


# The global switches of torch, each with what reads it and what sets it.
FLAGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    **{
        path: _attribute(path)
        for path in (
            "backends.cudnn.enabled",
            "backends.cudnn.benchmark",
            "backends.cudnn.deterministic",
            "backends.cudnn.allow_tf32",
            "backends.cuda.matmul.allow_tf32",
            "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        )
    },
    **{
        name: _functions(name)
        for name in ("float32_matmul_precision", "default_dtype", "num_threads")
    },
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
        # None where none was set: setting "cpu" instead would slow every later call down.
        lambda torch: (
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            and torch.get_default_device()
        ),
        lambda torch, value: torch.set_default_device(value),
    ),
}


def read_flags() -> dict[str, Any]:
    """Read every switch that this torch has; empty without torch. Never raises."""
    torch = loaded_torch()
    values: dict[str, Any] = {}
    for name, (read, _) in FLAGS.items() if torch is not None else ():
        try:
            values[name] = read(torch)
        except Exception as error:
            # Some builds lack a switch, and two ways of setting TF32 refuse to be mixed.
            log(DEBUG, "flag %s cannot be read: %r", name, error)
    return values


def restore_flags(before: dict[str, Any]) -> list[str]:
    """Put back what changed since `read_flags`, and name it. Never raises.

    Switches that did not change are not touched. Does nothing while the program ends.
    """
    torch = None if is_shutting_down() else loaded_torch()
    restored: list[str] = []
    for name, value in (read_flags() if before and torch is not None else {}).items():
        if name in before and before[name] != value:
            try:
                FLAGS[name][1](torch, before[name])
                restored.append(name)
            except Exception as error:
                # As in reading; one switch must not keep the others from being put back.
                log(DEBUG, "flag %s cannot be restored: %r", name, error)
    return restored
