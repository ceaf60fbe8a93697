"""Objects of the libraries that people use with torch: which of them release takes, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset

from torch_utils import ReleasedError, release


def layer() -> nn.Linear:
    return nn.Linear(8, 8)


def storages(*tensors: torch.Tensor) -> list[StorageWeakRef]:
    return [StorageWeakRef(t.untyped_storage()) for t in tensors]


def test_training_parts() -> None:
    """Schedulers, scalers and loaders let go of what they refer to, and own nothing of it."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    data = torch.ones(4, 2)
    loader = DataLoader(TensorDataset(data))
    release(scheduler, plateau, scaler, {"loader": loader})
    optimizer.step()
    assert data.sum() == 8
    uses = (scheduler.__class__.step, lambda s: s.step(), lambda s: s.state_dict())
    for thing in (scheduler, plateau, scaler, loader):
        for use in uses[1:]:
            with pytest.raises(
                ReleasedError, match=f"this {thing.__class__.__name__} was released"
            ):
                use(thing)
    with pytest.raises(ReleasedError):
        iter(loader)


def test_workers_of_a_loader_end() -> None:
    """Its processes end with it, though the variable lives on."""
    loader = DataLoader(
        TensorDataset(torch.ones(4, 2)),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    next(iter(loader))
    (worker,) = loader._iterator._workers
    assert worker.is_alive()
    release(loader)
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_transformers(tiny_model: Any) -> None:
    """A pipeline, its tokenizer and configuration, and caches of every layer."""
    from transformers import AutoModel, AutoTokenizer, DynamicCache, EncoderDecoderCache, pipeline

    path = str(tiny_model.parent / "transformer")
    model, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    pipe = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    batch = tokenizer(["a city"], return_tensors="pt")
    pipe("a city")
    weak = storages(*model.parameters(), *batch.values())
    assert release(pipe, tokenizer, model.config, batch).errors == ()
    assert all(w.expired() for w in weak)
    assert tokenizer("a city")
    with pytest.raises(ReleasedError):
        pipe("a city")
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    both = EncoderDecoderCache(cache, DynamicCache())
    weak = storages(cache.layers[0].keys, cache.layers[0].values)
    release({"past_key_values": both, "config": None})
    assert all(w.expired() for w in weak)


def test_accelerator() -> None:
    """What it has prepared goes: models, optimizers, schedulers and loaders."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(TensorDataset(torch.ones(2)))
    )
    model(torch.ones(1, 8)).sum().backward()
    prepared[1].step()
    weak = storages(*model.parameters(), optimizer.state[model.weight]["exp_avg"])
    assert release(accelerator).errors == ()
    assert all(w.expired() for w in weak)
    with pytest.raises(ReleasedError, match="this Adam was released"):
        optimizer.step()


def test_wrapped_optimizer() -> None:
    """accelerate's wrapper alone takes the optimizer in it along."""
    accelerate = pytest.importorskip("accelerate")
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    release(accelerate.Accelerator(cpu=True).prepare(optimizer))
    with pytest.raises(ReleasedError, match="this Adam was released"):
        optimizer.step()
    assert model(torch.ones(1, 8)).shape == (1, 8)
