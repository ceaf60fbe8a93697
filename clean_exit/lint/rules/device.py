"""device: calls of a GPU's driver, and garbage collections."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Function
from clean_exit.lint.values import Value, dotted, is_own

_DOTTED = re.compile(
    r"torch\.(cuda|xpu|mps|mtia|npu|hpu|musa|accelerator)\..*"
    r"|torch\._C\._?(cuda|cudart|gds|xpu|mps|mtia|accelerator|nccl).*"
    r"|torch\.distributed\.(destroy_process_group|barrier|all_reduce)"
    r"|(cupy|pycuda|numba\.cuda|cuda\.bindings)\..*|pynvml\.nvml\w+|gc\.collect"
)
# Asks, and touches nothing.
_HARMLESS = re.compile(r".*\.(is_initialized|is_built|_is_compiled|is_current_stream_capturing)")
_METHODS = re.compile(
    r"synchronize|empty_cache|ipc_collect|cuda"
    r"|(cuda|nccl|nvml|hip)[A-Z]\w*|(cublas|cudnn|cufft|cusparse)\w+"
    r"|cu(Mem|Ctx|Stream|Event|Module|Graph|Init|Array|Link|Launch)[A-Z]?\w*"
)


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find calls of a device by where they lead, or by names that nothing else has."""
    if frame.facts.alive:
        return ""
    said = dotted(value)
    if isinstance(value, Function):  # In torch itself they are the project's own.
        said = f"{value.module.name}.{value.name}"
    if not _DOTTED.fullmatch(said) or _HARMLESS.fullmatch(said):
        if is_own(value) or not _METHODS.fullmatch(getattr(node.func, "attr", "")):
            return ""
        said = ast.unparse(node.func)
    return f"{said}() {'collects garbage' if said == 'gc.collect' else 'calls the device'}"
