"""Run an example, and print what the test compares: measured.py PROGRAM

The bytes of all tensors that are alive at its end, and for each release the memory that went back
to the system.
"""

import gc
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import torch_utils
from torch_utils import SafePyTorchCleanup

release, leave = torch_utils.release, SafePyTorchCleanup.__exit__
freed: list[int] = []


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def measured(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        before = anonymous_bytes()
        result = function(*arguments)
        freed.append(before - anonymous_bytes())
        return result

    return call


torch_utils.release = measured(release)
setattr(SafePyTorchCleanup, "__exit__", measured(leave))

torch.ones(30 << 18)  # glibc then keeps freed blocks below 30 MB, as after the load of a model
names = runpy.run_path(sys.argv[1])
tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
alive = sum(storage.nbytes() for storage in storages.values())
print(json.dumps({"alive_mb": alive / 1e6, "freed_mb": [count / 1e6 for count in freed]}))
