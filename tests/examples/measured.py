"""Run an example, and print what the test compares: measured.py PROGRAM [MUTANT]

The bytes of all tensors that are alive at its end, and for each release the memory that went back
to the system. A mutant replaces the product: ``leak`` releases nothing, and ``break_sharing`` also
empties what others use.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

import torch_utils
from torch_utils import CleanupReport, SafePyTorchCleanup

MUTANT = (sys.argv[2:] or [""])[0]
SKIPPED = (type, types.ModuleType, types.FunctionType, types.FrameType)
release, leave = torch_utils.release, SafePyTorchCleanup.__exit__
manage = SafePyTorchCleanup.manage
managed: list[Any] = []
freed: list[int] = []


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def tensors_in(objects: list[Any]) -> list[torch.Tensor]:
    """Return all tensors that the objects lead to."""
    seen, found, pending = set(), [], list(objects)
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, SKIPPED):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        pending.extend(gc.get_referents(thing))
    return found


def measured(function: Any, objects: list[Any], *arguments: Any) -> Any:
    tensors = tensors_in(objects) if MUTANT == "break_sharing" else []
    before = anonymous_bytes()
    result = function(*arguments) if MUTANT != "leak" else CleanupReport()
    freed.append(before - anonymous_bytes())
    for tensor in tensors:
        tensor.data = torch.empty(0)
    return result


def managed_by(scope: Any, thing: Any) -> Any:
    managed.append(thing)
    return manage(scope, thing)


def left(scope: Any, *error: Any) -> None:
    if MUTANT == "leak":
        for thing in managed:
            scope.pop(thing)
    measured(leave, managed, scope, *error)
    managed.clear()


torch_utils.release = lambda *objects: measured(release, list(objects), *objects)
setattr(SafePyTorchCleanup, "__exit__", left)
setattr(SafePyTorchCleanup, "manage", managed_by)

torch.ones(30 << 18)  # glibc then keeps freed blocks below 30 MB, as after the load of a model
names = runpy.run_path(sys.argv[1])
tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
alive = sum(storage.nbytes() for storage in storages.values())
print(json.dumps({"alive_mb": alive / 1e6, "freed_mb": [count / 1e6 for count in freed]}))
