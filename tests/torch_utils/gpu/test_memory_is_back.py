"""After a scope or a release, reserved memory has its value before the load."""

from typing import Any

import pytest

from torch_utils import (
    SafePyTorchCleanup,
    find_batch_size,
    is_out_of_memory,
    memory_snapshot,
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
    """The caller's variables still exist, but hold no memory."""
    before = device.reserved_bytes()
    with SafePyTorchCleanup(thorough=True) as scope:
        model = scope.manage(load(device))
        inputs = scope.manage(device.inputs(model))
        outputs = scope.manage(model(inputs))
        device.watch(outputs)
    assert device.reserved_bytes() == before
    assert scope.report is not None
    assert scope.report.freed_bytes[device.place] > 0.9 * device.model_bytes
    assert scope.report.still_held == ()
    assert outputs.numel() == 0 and model is not None


def test_release_of_a_model_returns_its_memory(device: Any) -> None:
    """As a control, a cleared cache returns nothing. The release uses no other GPU."""
    before = device.reserved_bytes()
    model = load(device)
    device.settle()
    safe_cuda_empty_cache()
    assert device.reserved_bytes() - before > 0.9 * device.model_bytes
    report = release(model)
    assert report.freed_bytes[device.place] > 0.9 * device.model_bytes
    assert device.reserved_bytes() == before
    assert set(memory_snapshot().devices) <= {device.torch_name}


def test_training_returns_gradients_and_optimizer_state(device: Any) -> None:
    """The loss falls, and a checkpoint in host memory stays."""
    import torch

    torch.manual_seed(0)
    before = device.reserved_bytes()
    model = load(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    inputs = device.inputs(model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    device.watch(*(parameter.grad for parameter in model.parameters()))
    device.watch(*(state["momentum_buffer"] for state in optimizer.state.values()))
    checkpoint = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    release(model, optimizer, schedule, inputs, loss, thorough=True)
    assert device.reserved_bytes() == before
    assert all(value.isfinite().all() for value in checkpoint.values())


def test_failed_block_frees_the_model(device: Any) -> None:
    """The stored error keeps the variables of its frames, but not the managed model."""
    import torch

    before = device.reserved_bytes()

    def fail(model: Any) -> None:
        with torch.no_grad():  # Otherwise the autograd graph would hold the weights.
            outputs = model(device.inputs(model))
        device.watch(outputs)
        raise ValueError(f"wrong: {outputs.shape}")

    stored = None
    try:
        with SafePyTorchCleanup(thorough=True) as scope:
            fail(scope.manage(load(device)))
    except ValueError as error:
        stored = error
    assert "wrong" in str(stored)
    assert device.reserved_bytes() - before < 0.1 * device.model_bytes
    del stored
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


@pytest.mark.alone
def test_stored_oom_error_keeps_no_memory(device: Any) -> None:
    """95% of the card can be allocated while the error is stored, but not without the scope."""
    before, capacity = device.reserved_bytes(), device.capacity_bytes()
    stored = None
    try:
        _fill(device, device.model(MB), capacity)
    except Exception as error:
        stored = error
    assert stored is not None and is_out_of_memory(stored), repr(stored)
    safe_cuda_empty_cache()
    assert device.reserved_bytes() - before > 0.4 * capacity
    stored = None
    safe_cuda_empty_cache()
    try:
        with SafePyTorchCleanup(thorough=True) as scope:
            model = scope.manage(load(device))
            _fill(device, model, capacity)
    except Exception as error:
        stored = error
    assert stored is not None and is_out_of_memory(stored), repr(stored)
    taken = device.take(int(capacity * 0.95))
    assert taken.numel() >= 0.94 * capacity
    release(taken)


def _fill(device: Any, model: Any, capacity: int) -> None:
    blocks = [device.take(int(capacity * 0.45))]
    outputs = model(device.inputs(model))
    blocks.append(device.take(int(capacity * 0.45)))
    blocks.append(device.take(int(capacity * 0.45)))
    raise AssertionError(f"allocated more than the capacity: {len(blocks)}, {outputs.shape}")


@pytest.mark.alone
def test_find_batch_size_frees_each_failed_try(device: Any) -> None:
    capacity, tried = device.capacity_bytes(), []
    before = device.reserved_bytes()

    @find_batch_size(starting_batch_size=8)
    def work(batch_size: int) -> int:
        tried.append(batch_size)
        taken = [device.take(int(capacity * 0.3)) for _ in range(batch_size)]
        return len(taken)

    assert work() == 2
    assert tried == [8, 4, 2]
    safe_cuda_empty_cache()
    assert device.reserved_bytes() == before


def test_thorough_scope_frees_cuda_graph_pool(device: Any) -> None:
    """The module itself holds the graph."""
    import torch

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
