"""release: memory back although the variable lives on, and one clear error afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import ReleasedError, Resource, release


def storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False))


def test_module_is_emptied_in_place() -> None:
    """The storages are gone at once although the variable, and a layer's, live on."""
    model = two_layers()
    layer = model[0]
    storages = [storage(p) for p in model.parameters()]
    report = release(model, collect="never")
    assert all(s.expired() for s in storages)
    assert report.freed_bytes == {"host": 4 * (64 * 64 + 64 + 64 * 8)}
    assert report.still_held == ()
    with pytest.raises(ReleasedError, match=r"'0' of Sequential \(a Linear\) was released"):
        layer(torch.ones(1, 64))


def test_del_frees_nothing_while_held() -> None:
    """Negative control: dropping a reference of one's own frees nothing."""
    model = two_layers()
    weight = storage(model[0].weight)
    inner = [model]
    inner[0] = None
    del inner
    gc.collect()
    assert not weight.expired()


USES = {
    "call": lambda m: m(torch.ones(1, 64)),
    "forward": lambda m: m.forward(torch.ones(1, 64)),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({}),
    "parameters": lambda m: list(m.parameters()),
    "to": lambda m: m.to("cpu"),
    "eval": lambda m: m.eval(),
    "encode": lambda m: m.encode("text"),
    "len": len,
    "index": lambda m: m[0],
    "iterate": list,
    "set": lambda m: setattr(m, "x", 1),
    "delete": lambda m: delattr(m, "x"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "in a new module": lambda m: nn.Sequential(m)(torch.ones(1, 64)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_raises_one_error(use: Any) -> None:
    """The error names the module, where it was released, and what to do."""
    model = two_layers()
    release(model)
    with pytest.raises(ReleasedError, match=r"this Sequential was released at .*test_release\.py"):
        use(model)


def test_released_module_can_be_looked_at() -> None:
    """repr, isinstance, hash and a second release are no uses."""
    model = two_layers()
    release(model)
    assert repr(model) == "<released this Sequential>"
    assert isinstance(model, nn.Sequential)
    assert model == model
    assert len({model}) == 1
    assert release(model).freed_bytes == {}


def test_shared_parameter_stays_intact() -> None:
    """A model that is tied to a released one computes what it did before."""
    kept, gone = nn.Linear(8, 8), nn.Linear(8, 8)
    gone.weight = kept.weight
    before = kept(torch.ones(1, 8))
    report = release(gone)
    assert torch.equal(kept(torch.ones(1, 8)), before)
    assert [held.what for held in report.still_held] == ["Linear.weight"]


def test_shared_submodule_stays_intact() -> None:
    """A submodule that a live model contains too is left whole, with all below it."""
    encoder = two_layers()
    live = nn.Sequential(encoder, nn.ReLU())
    gone = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 8)})
    head = storage(gone["head"].weight)
    before = live(torch.ones(1, 64))
    release(gone)
    assert torch.equal(live(torch.ones(1, 64)), before)
    assert head.expired()


def test_cycle_is_freed_without_collection() -> None:
    """Emptying the dictionaries breaks every cycle that goes through the model."""
    model = two_layers()
    model.card = {"model": model}
    weight = storage(model[0].weight)
    gc.disable()
    try:
        release(model, collect="never")
        assert weight.expired()
    finally:
        gc.enable()


def test_abc_and_slots_layouts() -> None:
    """Classes whose instances have a layout of their own are buried all the same."""
    import abc

    class Abstract(abc.ABC, nn.Module):
        pass

    class Slotted(nn.Module):
        __slots__ = ("extra",)

    for kind in (Abstract, Slotted):
        module = kind()
        module.weight = nn.Parameter(torch.ones(4))
        weight = storage(module.weight)
        release(module)
        assert weight.expired()
        with pytest.raises(ReleasedError, match=f"this {kind.__name__} was released"):
            module.weight


def test_own_destructor_runs_once_and_early() -> None:
    """A module's destructor sees a whole module, and never an empty one."""
    seen: list[int] = []

    class Naive(nn.Linear):
        def __del__(self) -> None:
            seen.append(self.weight.numel())

    module = Naive(2, 2)
    release(module)
    del module
    assert seen == [4]


def tensors() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inference = torch.ones(100)
    leaf = torch.ones(100, requires_grad=True)
    pending = leaf * 2
    import numpy as np

    return {
        "plain": torch.ones(100),
        "scalar": torch.tensor(3.0),
        "inference": inference,
        "leaf": torch.ones(100, requires_grad=True),
        "pending": pending,
        "numpy": torch.from_numpy(np.ones(100)),
        "shared": torch.ones(100).share_memory_(),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 1]]), torch.ones(2), (100,), check_invariants=True
        ),
        "bfloat16": torch.ones(100, dtype=torch.bfloat16),
        "csr": torch.eye(4).to_sparse_csr(),
        "csc": torch.eye(4).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "quantised": torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8),
        "meta": torch.ones(100, device="meta"),
    }


SOME_WARN = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta:UserWarning",
    "ignore:.*quantized tensor creation functions.*:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)
KINDS_OF_TENSOR = (
    "plain scalar inference leaf pending numpy shared sparse bfloat16 csr csc bsr quantised meta"
).split()


@SOME_WARN
@pytest.mark.parametrize("kind", KINDS_OF_TENSOR)
def test_tensor_is_empty_afterwards(kind: str) -> None:
    """Tensors of every kind let go of their memory, and are empty rather than garbage."""
    tensor = tensors()[kind]
    dtype = tensor.dtype
    assert release(tensor).errors == ()
    assert tensor.numel() == 0
    assert tensor.dtype == dtype


@SOME_WARN
def test_nested_tensor_is_refused() -> None:
    """It cannot be emptied in place without becoming garbage, so it is left whole."""
    nested = torch.nested.nested_tensor([torch.ones(5), torch.ones(2)])
    with pytest.raises(TypeError, match="does not know how to give up Tensor"):
        release(nested)
    assert [t.sum().item() for t in nested.unbind()] == [5, 2]


def test_view_keeps_its_values() -> None:
    """A view stays right, and the report says what is still held."""
    tensor = torch.arange(10.0)
    view = tensor[2:4]
    report = release(tensor)
    assert view.tolist() == [2.0, 3.0]
    assert report.still_held_bytes == 40
    assert "still held: 40 B: Tensor" in str(report)


def test_containers_and_optimizer() -> None:
    """Everything in nested containers is released, each object once."""
    model, tensor = two_layers(), torch.ones(10)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    weight = storage(model[0].weight)
    report = release({"m": [model, None, "name"]}, (tensor, {tensor}), deque([optimizer]))
    assert weight.expired()
    assert tensor.numel() == 0
    assert report.still_held == ()
    assert report.freed_bytes["host"] > 4 * 3 * 64 * 64  # weights, and Adam's two copies
    with pytest.raises(ReleasedError, match="this Adam was released"):
        optimizer.step()


class Closable:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


def test_close_is_called() -> None:
    """Anything with close() is closed, and a Resource counts what it releases itself."""

    class Owner(Resource):
        def __init__(self) -> None:
            self.model = two_layers()

        def _release(self) -> None:
            release(self.model)

    closable, owner = Closable(), Owner()
    report = release(closable, owner)
    assert closable.closed == 1
    assert owner.closed
    assert report.freed_bytes["host"] == 4 * (64 * 64 + 64 + 64 * 8)


def test_unknown_object_is_refused_before_anything_is_touched() -> None:
    """A TypeError names the place of the unknown object, and the rest is whole."""
    model, closable = two_layers(), Closable()
    with pytest.raises(TypeError, match=r"dict\['x'\] \(a builtins\.object\)"):
        release(model, closable, {"x": object()})
    assert model(torch.ones(1, 64)).shape == (1, 8)
    assert closable.closed == 0
    for scalar in ("text", 3):
        with pytest.raises(TypeError, match="does not know how"):
            release(scalar)
    with pytest.raises(ValueError, match='"auto", "never" or "full", not'):
        release(model, collect="sometimes")  # type: ignore[arg-type]


def test_errors_are_collected_and_skip_nothing() -> None:
    """An error is reported and logged; KeyboardInterrupt arrives after all the rest."""
    tensor, bad = torch.ones(10), Closable(ValueError("no"))
    report = release(bad, tensor)
    assert [str(e) for e in report.errors] == ["no"]
    assert tensor.numel() == 0
    tensor = torch.ones(10)
    with pytest.raises(KeyboardInterrupt):
        release(Closable(KeyboardInterrupt()), tensor)
    assert tensor.numel() == 0


def test_nothing_to_release() -> None:
    """None and empty containers are nothing."""
    report = release(None, [], {})
    assert report.freed_bytes == {}
    assert "freed nothing" in str(report)


@pytest.mark.parametrize("seconds", ["x", -1, float("nan"), float("inf"), None, True])
def test_no_time_to_search(seconds: Any) -> None:
    """Refused before anything is touched."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="search_s must be"):
        release(model, search_s=seconds)
    assert model(torch.ones(1, 2)).shape == (1, 2)
