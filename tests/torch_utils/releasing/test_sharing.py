"""Tests of the rule: what is passed is emptied, and what anything else refers to stays whole."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, list-item, misc, no-untyped-call"

import gc
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.programs import TIMEOUT_S
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import ReleasedError, release

pytestmark = pytest.mark.usefixtures("frozen_heap")

INPUTS = torch.ones(1, 4)
Use = Callable[[], torch.Tensor]


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(4, 2)


class App:
    """An application with a state, as web frameworks have it."""

    model: nn.Module
    app: Any
    data: Any

    def record(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.data.append(output.detach())


def in_a_closure(backbone: nn.Module) -> Use:
    return lambda: backbone(INPUTS)


def in_a_thread(backbone: nn.Module) -> Use:
    goes_on, answers = threading.Event(), []

    def work(model: nn.Module) -> None:
        goes_on.wait(TIMEOUT_S)
        answers.append(model(INPUTS))

    thread = threading.Thread(target=work, args=(backbone,))
    thread.start()

    def use() -> torch.Tensor:
        goes_on.set()
        thread.join()
        return answers[0]

    return use


@types.coroutine
def turn() -> Any:
    yield


def in_a_generator(backbone: nn.Module) -> Use:
    def stream() -> Any:
        while True:
            yield backbone(INPUTS)

    answers = stream()
    next(answers)
    return lambda: next(answers)


def in_a_coroutine(backbone: nn.Module) -> Use:
    async def answer() -> torch.Tensor:
        await turn()
        return backbone(INPUTS)

    coroutine = answer()
    coroutine.send(None)

    def use() -> torch.Tensor:
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        return ended.value.value

    return use


def in_a_hook(backbone: nn.Module) -> Use:
    other = nn.Linear(4, 4)
    other.register_forward_hook(lambda module, inputs, output: backbone(output))
    return lambda: other(INPUTS)


def in_another_model(backbone: nn.Module) -> Use:
    other = nn.Sequential(backbone)
    return lambda: other(INPUTS)


WAYS = [in_a_closure, in_a_thread, in_a_generator, in_a_coroutine, in_a_hook, in_another_model]


def test_part_that_anything_else_refers_to_works() -> None:
    models = [Classifier(nn.Linear(4, 4)) for _ in WAYS]
    heads = weak(*[model.head for model in models])
    uses = [way(model.backbone) for way, model in zip(WAYS, models, strict=True)]
    report = release(*models)
    for way, use in zip(WAYS, uses, strict=True):
        assert use().shape == (1, 4), way
    assert gone(heads)
    held = [(held.what, held.nbytes) for held in report.still_held]
    assert held == [("Classifier.backbone", 80)] * len(WAYS)
    for model in models:
        with pytest.raises(ReleasedError, match=r"this Classifier was released at .*test_sharing"):
            model(INPUTS)


@torch.no_grad()
def predict(encoder: nn.Module, *inputs: torch.Tensor) -> Any:
    return [encoder(one) for one in inputs]


def keep_output(encoder: nn.Module, output: torch.Tensor) -> None:
    encoder(torch.ones(1, 5))
    output.sum()


FAILING: list[Callable[[Any], Any]] = [
    lambda s: predict(s.model, torch.ones(1, 5)),
    lambda s: max(s.model(one) for one in [torch.ones(1, 5)]),
    lambda s: keep_output(s.model, s.model(INPUTS)),
]


@pytest.mark.parametrize("fail", FAILING)
def test_stored_exceptions_of_a_service_keep_nothing(fail: Callable[[Any], Any]) -> None:
    service = App()
    service.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    storages = weak(service.model)
    with pytest.raises(RuntimeError) as kept:
        fail(service)
    release(service)
    assert gone(storages)
    assert kept.value.__traceback__ is not None


class Node(nn.Module):
    """A module in reference cycles: by a bound method, a list, a closure and an attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.bound = self.layer.forward
        self.layer.owner = [self]
        self.again = lambda: self
        self.layer.weight.owner = {"node": self}


@pytest.mark.parametrize("collect", ["auto", "young", "never"])
def test_cycles_are_broken_without_a_full_collection(collect: Any) -> None:
    class Slotted:
        __slots__ = ("node", "owner")

    service = App()
    service.model, service.data = Node(1000), Slotted()
    service.data.owner, service.data.node = service.data, nn.Linear(4, 4)
    storages = weak(service.model, service.data.node)
    with without_collector(), garbage_collections() as generations:
        assert release(service, collect=collect).still_held == ()
    assert gone(storages)
    assert generations == []


def test_cycle_to_which_a_destructor_leads_is_left_to_python() -> None:
    """A destructor may use all of it, or finds none of it by a weak reference."""

    class Part:
        def __init__(self, node: Callable[[], Any]) -> None:
            self.node = node

        def __del__(self) -> None:
            node = self.node()
            seen.append(node is None or node.layer.weight.numel() == 16)

    links: list[Callable[[Node], Any]] = [lambda node: lambda: node, weakref.ref]
    for collect, link in itertools.product(("auto", "never"), links):
        seen: list[bool] = []
        service = App()
        service.model = Node(4)
        service.model.part = Part(link(service.model))
        storages = weak(service.model)
        with without_collector():
            report = release(service, collect=collect)
            assert (gone(storages), seen) == ((True, [True]) if collect == "auto" else (False, []))
            assert bool(report.still_held) == (collect == "never")
            gc.collect()
        assert gone(storages) and seen == [True]


def test_memory_behind_many_objects_is_found() -> None:
    service = App()
    service.data, service.app = [[n] for n in range(60_000)], App()
    service.app.model = nn.Linear(4, 4)
    storages = weak(service.app.model)
    assert release(service).freed_bytes == {"host": 80}
    assert gone(storages)


def test_part_of_a_cycle_that_a_thread_uses_stays_whole() -> None:
    service = App()
    service.model = Node(4)
    use = in_a_thread(service.model.layer)
    (held,) = release(service).still_held
    assert held.nbytes == 80
    assert use().shape == (1, 4)


def test_full_collection_runs_only_for_what_may_be_garbage() -> None:
    """It is not needed if a variable refers to the memory."""
    for is_held in (False, True):
        model = nn.Sequential(nn.Linear(1000, 1000))
        local = model[0] if is_held else None
        with without_collector(), garbage_collections() as generations:
            assert bool(release(model).still_held) == is_held
        assert 2 not in generations
        del local
    model = nn.Sequential(nn.Linear(1000, 1000))
    storages = weak(model)
    with without_collector(), garbage_collections() as generations:
        trainer = App()
        trainer.app, trainer.data = trainer, [model[0]]  # A cycle that nothing else refers to.
        gc.collect(0), gc.collect(1)  # It is old then, and young collections do not find it.
        del trainer
        assert release(model).still_held == ()
    assert gone(storages)
    assert 2 in generations


def test_object_is_emptied_whose_only_model_is_passed_too() -> None:
    for order in (lambda s: [s, s.model], lambda s: [[s.model], s]):
        service = App()
        service.model = nn.Linear(4, 4)
        storages = weak(service.model)
        assert release(*order(service)).errors == ()
        assert gone(storages)
        with pytest.raises(ReleasedError):
            _ = service.model


def test_hook_in_a_live_model_raises_once_its_owner_is_released() -> None:
    model, service = nn.Linear(4, 4), App()
    service.data = []
    model.register_forward_hook(service.record)
    model(INPUTS)
    storages = weak(*service.data)
    release(service)
    assert gone(storages)
    with pytest.raises(ReleasedError, match="this App was released"):
        model(INPUTS)


def test_weights_of_a_file_are_unmapped_and_cycles_around_them_collected(tmp_path: Path) -> None:
    """Weights that were mapped from a file are lent, as those of transformers' models are."""
    model = nn.Linear(1000, 1000)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True)
    model.load_state_dict(state, assign=True)
    del state
    service = App()
    service.model, model.card = model, [model]
    storages = weak(model)
    del model
    assert "weights.pt" in Path("/proc/self/maps").read_text()
    report = release(service)
    assert gone(storages)
    assert report.still_held == ()
    assert "weights.pt" not in Path("/proc/self/maps").read_text()


def test_companion_in_a_container_is_left_alone_whatever_lies_behind_it() -> None:
    settings, extractor, registry = App(), App(), {"model": nn.Linear(4, 4)}
    settings.data, extractor.data = registry, np.ones(10)
    release([nn.Linear(4, 4), settings, {"extractor": extractor}])
    assert (settings.data, extractor.data.sum()) == (registry, 10)
    assert registry["model"](INPUTS).shape == (1, 4)
