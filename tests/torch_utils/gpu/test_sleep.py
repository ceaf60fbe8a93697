"""A sleeping model gives back the device's memory, and comes back equal from pinned memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_utils import ModelHost, offload
from torch_utils.hosting import sleep


@contextlib.contextmanager
def host_memory_moves(device: Any) -> Iterator[None]:
    """Let a rehearsal move what it holds, too."""
    staying = set(sleep.STAYING)
    if device.torch_name == "cpu":
        sleep.STAYING.discard("cpu")
    try:
        yield
    finally:
        sleep.STAYING |= staying


def values_of(model: Any) -> list[Any]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def test_sleeping_model_gives_back_the_devices_memory(device: Any) -> None:
    device.settle()
    before = device.reserved_bytes()
    with host_memory_moves(device), ModelHost(device.model, keep_alive=-1) as host:
        with host.lease() as model:
            values, names = values_of(model), {str(p.device) for p in model.parameters()}
            loaded = device.reserved_bytes()
            del model
        assert loaded - before >= 0.9 * device.model_bytes
        for _ in range(3):
            assert host.sleep()
            assert device.reserved_bytes() - before < 0.1 * device.model_bytes
            assert host.status().nbytes_by_device.keys() == {"host"}
            with host.lease() as model:
                assert {str(p.device) for p in model.parameters()} == names
                assert all(map(torch.equal, values_of(model), values))
                del model
        assert host.status().loads == 1


def test_work_in_another_stream_is_done_before_its_model_sleeps(device: Any) -> None:
    model = device.model()
    inputs = device.inputs(model)
    with host_memory_moves(device):
        expected = model(inputs).detach().cpu()
        device.synchronize()
        with device.other_stream():
            device.keep_busy()
            output = model(inputs).detach()
        with offload(model):
            assert bool(abs(output.cpu() - expected).max() < 1e-3)
        again = model(inputs).detach().cpu()
    assert bool(abs(again - expected).max() < 1e-3)
