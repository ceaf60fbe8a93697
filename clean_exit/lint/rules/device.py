"""device: calls of a GPU's driver, and garbage collections."""

from __future__ import annotations

import ast
import re

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Function
from clean_exit.lint.values import Bound, External, Values

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


def on_call(visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
    """Find calls of a device by where they lead, or by names that nothing else has."""
    if frame.facts.alive:
        return
    dotted = [value.dotted for value in values if isinstance(value, External)]
    # In torch itself these functions are the project's own, and the device all the same.
    dotted += [f"{f.module.name}.{f.name}" for f in values if isinstance(f, Function)]
    known = [one for one in dotted if _is_device(one)]
    is_own = any(isinstance(value, (Bound, Function)) for value in values)
    if not known and not is_own and isinstance(node.func, ast.Attribute):
        known = [ast.unparse(node.func)] if _METHODS.fullmatch(node.func.attr) else []
    if known:
        verb = "collects garbage" if known[0] == "gc.collect" else "calls the device"
        visit.report("device", node, f"{known[0]}() {verb}", frame)


def _is_device(dotted: str) -> bool:
    return bool(_DOTTED.fullmatch(dotted)) and not _HARMLESS.fullmatch(dotted)
