"""After a scope or a release, reserved memory has its value before the load."""

from typing import Any

import pytest
import torch

from torch_utils import (
    SafePyTorchCleanup,
    find_batch_size,
    is_out_of_memory,
    release,
    safe_cuda_empty_cache,
)

MB = 1 << 20


def load(device: Any) -> Any:
    """Load a large model, and check that its memory counts."""
    before = device.reserved_bytes()
    model = device.model()
    assert device.reserved_bytes() - before > 0.9 * device.model_bytes
    return model


def test_scope_returns_all_device_memory(device: Any) -> None:
    """The caller's variables still exist. As a control, a cleared cache returns nothing."""
    before = device.reserved_bytes()
    with SafePyTorchCleanup(thorough=True) as scope:
        model = scope.manage(load(device))
        inputs = scope.manage(device.inputs(model))
        outputs = scope.manage(model(inputs))
        device.watch(outputs)
        safe_cuda_empty_cache()
        assert device.reserved_bytes() - before > 0.9 * device.model_bytes
    assert device.reserved_bytes() == before
    assert scope.report is not None
    assert scope.report.freed_bytes[device.place] > 0.9 * device.model_bytes
    assert scope.report.still_held == ()
    assert outputs.numel() == 0 and model is not None


def test_training_returns_gradients_and_optimizer_state(device: Any) -> None:
    torch.manual_seed(0)
    before = device.reserved_bytes()
    model = load(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = device.inputs(model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    device.watch(*(parameter.grad for parameter in model.parameters()))
    device.watch(*(state["momentum_buffer"] for state in optimizer.state.values()))
    release(model, optimizer, inputs, loss, thorough=True)
    assert device.reserved_bytes() == before


def test_failed_block_frees_the_model(device: Any) -> None:
    """The stored error keeps the variables of its frames, but not the managed model."""
    before = device.reserved_bytes()

    def fail(model: Any) -> None:
        with torch.no_grad():  # Otherwise the autograd graph would hold the weights.
            outputs = model(device.inputs(model))
        device.watch(outputs)
        raise ValueError(f"wrong: {outputs.shape}")

    with pytest.raises(ValueError, match="wrong") as stored:
        with SafePyTorchCleanup(thorough=True) as scope:
            fail(scope.manage(load(device)))
    assert device.reserved_bytes() - before < 0.1 * device.model_bytes
    del stored
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


@pytest.mark.alone
def test_stored_oom_error_keeps_no_memory(device: Any) -> None:
    """95% of the card can be allocated while the error is stored, but not without the scope."""
    before, capacity = device.reserved_bytes(), device.capacity_bytes()

    def fill(model: Any) -> None:
        blocks = [device.take(int(capacity * 0.45))]
        outputs = model(device.inputs(model))
        blocks += [device.take(int(capacity * 0.45)) for _ in range(2)]
        raise AssertionError(f"allocated more than the capacity: {len(blocks)}, {outputs.shape}")

    with pytest.raises(RuntimeError) as stored:
        fill(device.model(MB))
    assert is_out_of_memory(stored.value)
    safe_cuda_empty_cache()
    assert device.reserved_bytes() - before > 0.4 * capacity
    del stored
    safe_cuda_empty_cache()
    with pytest.raises(RuntimeError) as stored, SafePyTorchCleanup(thorough=True) as scope:
        fill(scope.manage(load(device)))
    assert is_out_of_memory(stored.value)
    taken = device.take(int(capacity * 0.95))
    assert taken.numel() >= 0.94 * capacity
    release(taken)


@pytest.mark.alone
def test_find_batch_size_frees_each_failed_try(device: Any) -> None:
    capacity, tried = device.capacity_bytes(), []
    before = device.reserved_bytes()

    @find_batch_size(starting_batch_size=8)
    def work(batch_size: int) -> int:
        tried.append(batch_size)
        return len([device.take(int(capacity * 0.3)) for _ in range(batch_size)])

    assert work() == 2
    assert tried == [8, 4, 2]
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


def test_thorough_scope_frees_cuda_graph_pool(device: Any) -> None:
    """The module itself holds the graph."""
    before = device.reserved_bytes()

    class Captured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = load(device)
            self.inputs = device.inputs(self.model)
            with torch.no_grad():
                self.graph, self.outputs = device.capture(lambda: self.model(self.inputs))

    with SafePyTorchCleanup(thorough=True) as scope:
        module = scope.manage(Captured())
        module.graph.replay()
        device.synchronize()
        assert module.outputs.isfinite().all()
    assert device.reserved_bytes() == before


def test_thorough_release_frees_cuda_graph_in_a_cycle(device: Any) -> None:
    """No variable holds the graph, and the collector has not run."""
    before = device.reserved_bytes()
    model = load(device)
    inputs = device.inputs(model)
    cycle: list[Any] = [device.capture(lambda: model(inputs).detach())]
    cycle.append(cycle)
    del cycle
    release(model, inputs, collect="full", thorough=True)
    assert device.reserved_bytes() == before


def test_thorough_scope_frees_compiled_model(device: Any) -> None:
    """Compiled code, its constants and its CUDA graphs are freed as well."""
    device.assert_clean(
        device.run("""
        import warnings
        warnings.simplefilter("ignore")
        import torch
        from torch_utils import SafePyTorchCleanup
        device.settle()
        before = device.reserved_bytes()
        with SafePyTorchCleanup(thorough=True) as scope:
            model = scope.manage(device.model())
            inputs = scope.manage(device.inputs(model))
            compiled = scope.manage(device.compiled(model))
            with torch.no_grad():
                for _ in range(4):
                    outputs = compiled(inputs)
            assert outputs.isfinite().all()
            del outputs
            assert device.reserved_bytes() > before
        held = device.reserved_bytes() - before
        assert held == 0, f"{held} bytes: {scope.report}"
        """)
    )
