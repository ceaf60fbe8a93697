"""torch's global switches: read them all, and put back those that changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_utils._runtime import DEBUG, is_shutting_down, loaded_torch, log


@dataclass(frozen=True)
class Flag:
    """One switch: how it is read and how it is set."""

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _attribute(path: str) -> Flag:
    """Make a flag of an attribute below torch, such as ``backends.cudnn.benchmark``."""
    *owners, name = path.split(".")

    def owner(torch: Any) -> Any:
        for part in owners:
            torch = getattr(torch, part)
        return torch

    return Flag(
        path,
        lambda torch: getattr(owner(torch), name),
        lambda torch, value: setattr(owner(torch), name, value),
    )


FLAGS = (
    _attribute("backends.cudnn.enabled"),
    _attribute("backends.cudnn.benchmark"),
    _attribute("backends.cudnn.deterministic"),
    _attribute("backends.cudnn.allow_tf32"),
    _attribute("backends.cuda.matmul.allow_tf32"),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    Flag(
        "float32_matmul_precision",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    Flag(
        "deterministic_algorithms",
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Flag(
        "grad_mode",
        lambda torch: torch.is_grad_enabled(),
        lambda torch, value: torch._C._set_grad_enabled(value),
    ),
    Flag(
        "default_dtype",
        lambda torch: torch.get_default_dtype(),
        lambda torch, value: torch.set_default_dtype(value),
    ),
    Flag(
        "default_device",
        # None where none was set: setting "cpu" instead would slow every later call down.
        lambda torch: (
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            and torch.get_default_device()
        ),
        lambda torch, value: torch.set_default_device(value),
    ),
    Flag(
        "num_threads",
        lambda torch: torch.get_num_threads(),
        lambda torch, value: torch.set_num_threads(value),
    ),
)


def read_flags() -> dict[str, Any]:
    """Read every switch that this torch has; empty without torch. Never raises."""
    torch = loaded_torch()
    values: dict[str, Any] = {}
    for flag in FLAGS if torch is not None else ():
        try:
            values[flag.name] = flag.read(torch)
        except Exception as error:
            # Some builds lack a switch, and two ways of setting TF32 refuse to be mixed.
            log(DEBUG, "flag %s cannot be read: %r", flag.name, error)
    return values


def restore_flags(before: dict[str, Any]) -> list[str]:
    """Put back what changed since `read_flags`, and name it. Never raises.

    Switches that did not change are not touched. Does nothing while the program ends.
    """
    torch = None if is_shutting_down() else loaded_torch()
    restored: list[str] = []
    now = read_flags() if torch is not None else {}
    for flag in FLAGS:
        if flag.name not in before or before[flag.name] == now.get(flag.name, before[flag.name]):
            continue
        try:
            flag.write(torch, before[flag.name])
            restored.append(flag.name)
        except Exception as error:
            # As in reading; one switch must not keep the others from being put back.
            log(DEBUG, "flag %s cannot be restored: %r", flag.name, error)
    return restored
