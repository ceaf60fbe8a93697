"""A model in a process of its own returns all memory, including the device context."""

from typing import Any

from tests.support import programs

PROGRAM = """
import os, sys, time
from unittest import SkipTest

class Model:
    def __init__(self):
        import torch
        device.make_context()
        self.layers = device.model()
    def size(self):
        return sum(parameter.nbytes for parameter in self.layers.parameters())
    def pid(self):
        return os.getpid()
    def has_context(self):
        return device.has_context()

def load():
    return Model()

def wait_until(question, what):
    # The driver needs time to take back the memory of an ended process.
    for _ in range(300):
        if question():
            return
        time.sleep(0.1)
    raise AssertionError(what)

if __name__ == "__main__":
    from torch_utils import ModelHost
    for _ in range(2 if device.name == "cuda" else 1):
        with ModelHost(load, isolation="process", keep_alive=-1) as host:
            with host.lease() as model:
                assert model.size() > 0.9 * device.model_bytes
                assert model.has_context(), "the control"
                child = model.pid()
            assert child != os.getpid()
            if not device.bytes_of(child):
                raise SkipTest("NVML shows no entry of the child: a container with its own pids?")
            host.unload()
            wait_until(lambda: not device.bytes_of(child), "the child keeps its context")
            assert not device.has_context() and "torch" not in sys.modules
"""


def test_process_unload_returns_the_device_context(device: Any) -> None:
    """NVML has an entry of the child until then. The parent has neither a context nor torch."""
    result = programs.run(device.source(PROGRAM), as_file=True)
    device.assert_clean(result)
