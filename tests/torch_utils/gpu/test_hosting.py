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
    def describe(self):
        nbytes = sum(parameter.nbytes for parameter in self.layers.parameters())
        return os.getpid(), nbytes, device.has_context()

def load():
    return Model()

if __name__ == "__main__":
    from torch_utils import ModelHost
    for _ in range(2 if device.name == "cuda" else 1):
        with ModelHost(load, isolation="process", keep_alive=-1) as host:
            with host.lease() as model:
                child, nbytes, has_context = model.describe()
            assert nbytes > 0.9 * device.model_bytes
            assert has_context, "the control"
            assert child != os.getpid()
            if not device.bytes_of(child):
                raise SkipTest("NVML shows no entry of the child: a container with its own pids?")
            host.unload()
            deadline = time.monotonic() + 30
            while device.bytes_of(child):  # The driver needs time to take back its memory.
                assert time.monotonic() < deadline, "the child keeps its context"
                time.sleep(0.1)
            assert not device.has_context() and "torch" not in sys.modules
"""


def test_process_unload_returns_the_device_context(device: Any) -> None:
    """NVML has an entry of the child until then. The parent has neither a context nor torch."""
    result = programs.run(device.source(PROGRAM), as_file=True)
    device.assert_clean(result)
