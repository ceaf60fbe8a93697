"""A model in a process of its own returns all memory, including the device context."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import SkipTest

from gpu.device import slow_rehearsal
from support import programs

PROGRAM = """
import os, sys, time

class Model:
    def __init__(self):
        import torch
        device.make_context()
        self.layers = device.model()
    def size(self):
        return sum(parameter.nbytes for parameter in self.layers.parameters())
    def pid(self):
        return os.getpid()

def load():
    return Model()

def wait_until(question, what):
    # The driver needs time to take back the memory of an ended process.
    for _ in range(300):
        if question():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what}: {device.used_bytes()} bytes used")

if __name__ == "__main__":
    from torch_utils import ModelHost
    before = device.used_bytes()
    for _ in range(2 if device.name == "cuda" else 1):
        with ModelHost(load, isolation="process", keep_alive=-1) as host:
            with host.lease() as model:
                assert model.size() > 0.9 * device.model_bytes
                child = model.pid()
            assert child != os.getpid()
            assert device.has_context(child)
            assert device.used_bytes() - before >= device.context_bytes(), "the control"
            host.unload()
            wait_until(lambda: device.used_bytes() - before < device.context_bytes(), "unloaded")
            assert not device.has_context(child)
            assert not device.has_context() and "torch" not in sys.modules
"""


@slow_rehearsal
def test_process_unload_returns_the_device_context(device: Any) -> None:
    """NVML shows it for the whole card. The parent has neither a context nor torch."""
    if importlib.util.find_spec("torch_utils.hosting") is None:
        raise SkipTest("this version lacks torch_utils.hosting")
    result = programs.run(device.source(PROGRAM), as_file=True)
    device.assert_clean(result)
