"""Tests of the rule: what is passed is emptied, and what anything else refers to stays whole."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, list-item, misc, no-untyped-call"

import contextvars
import gc
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    encoder: nn.Module
    model: nn.Module
    app: Any
    data: Any


REGISTRY: dict[str, Any] = {}
CONTEXT: contextvars.ContextVar[nn.Module] = contextvars.ContextVar("CONTEXT")


def in_a_closure(backbone: nn.Module) -> Use:
    return lambda: backbone(INPUTS)


def in_a_dictionary_of_a_module(backbone: nn.Module) -> Use:
    REGISTRY["backbone"] = backbone
    return lambda: REGISTRY.pop("backbone")(INPUTS)


def in_a_context_variable(backbone: nn.Module) -> Use:
    context = contextvars.copy_context()
    context.run(CONTEXT.set, backbone)
    return lambda: context.run(lambda: CONTEXT.get()(INPUTS))


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


def in_a_generator(backbone: nn.Module) -> Use:
    def stream() -> Any:
        while True:
            yield backbone(INPUTS)

    answers = stream()
    next(answers)
    return lambda: next(answers)


def in_a_hook(backbone: nn.Module) -> Use:
    other = nn.Linear(4, 4)
    other.register_forward_hook(lambda module, inputs, output: backbone(output))
    return lambda: other(INPUTS)


def in_another_model(backbone: nn.Module) -> Use:
    other = nn.Sequential(backbone)
    return lambda: other(INPUTS)


WAYS = (
    *(in_a_closure, in_a_dictionary_of_a_module, in_a_context_variable),
    *(in_a_thread, in_a_generator, in_a_hook, in_another_model),
)


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
def predict(encoder: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    return [encoder(one) for one in inputs]


def keep_output(encoder: nn.Module, output: torch.Tensor) -> None:
    encoder(torch.ones(1, 5))
    output.sum()


FAILING: list[Callable[[Any], Any]] = [
    lambda s: predict(s.encoder, torch.ones(1, 5)),
    lambda s: (lambda encoder: lambda: encoder(torch.ones(1, 5)))(s.encoder)(),
    lambda s: max(s.encoder(one) for one in [torch.ones(1, 5)]),
    lambda s: keep_output(s.encoder, s.encoder(INPUTS)),
]


@pytest.mark.parametrize("fail", FAILING)
def test_stored_exceptions_of_a_service_keep_nothing(fail: Callable[[Any], Any]) -> None:
    service = App()
    service.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    storages, kept = weak(service.encoder), None
    try:
        fail(service)
    except RuntimeError as error:
        kept = error
    release(service)
    assert gone(storages)
    assert kept is not None and kept.__traceback__ is not None


def test_suspended_functions_are_users() -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    async def answer(layer: nn.Module) -> torch.Tensor:
        await turn()
        return layer(INPUTS)

    class turn:
        def __await__(self) -> Any:
            yield

    coroutine = answer(model[0])
    coroutine.send(None)
    release(model)
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert ended.value.value.shape == (1, 4)


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

    for size in (4, 1000):
        service = App()
        service.model, service.data = Node(size), Slotted()
        service.data.owner, service.data.node = service.data, nn.Linear(size, size)
        storages = weak(service.model, service.data.node)
        with without_collector(), garbage_collections() as generations:
            assert release(service, collect=collect).still_held == ()
        assert gone(storages)
        assert generations == []


def test_cycle_with_a_destructor_is_left_to_python() -> None:
    """A destructor may use all of it."""

    class Handle:
        def __init__(self, node: Node) -> None:
            self.node = node

        def __del__(self) -> None:
            seen.append(self.node.layer.weight.numel())

    for collect in ("auto", "never"):
        seen: list[int] = []
        service = App()
        service.model = Node(4)
        service.model.handle = Handle(service.model)
        storages = weak(service.model)
        with without_collector():
            report = release(service, collect=collect)
            assert (gone(storages), seen) == ((True, [16]) if collect == "auto" else (False, []))
            assert bool(report.still_held) == (collect == "never")
            gc.collect()
        assert gone(storages) and seen == [16]


def test_weak_reference_never_finds_an_object_that_was_emptied() -> None:
    """Not in a destructor, a callback or another thread, as in Python's own collection."""

    class Child:
        def __init__(self, parent: Node) -> None:
            self.parent = weakref.ref(parent)

        def __del__(self) -> None:
            parent = self.parent()
            seen.append(parent is None or parent.layer.weight.numel() == 16)

    seen: list[bool] = []
    service = App()
    service.model = Node(4)
    service.model.child = Child(service.model)
    storages = weak(service.model)
    with without_collector():
        release(service, collect="never")
        assert not gone(storages)
        gc.collect()
    assert gone(storages) and seen == [True]


def test_namespace_of_a_module_that_an_object_uses_stays() -> None:
    module = types.ModuleType("plugin")
    exec("kept = 1", vars(module))
    service = App()
    service.__dict__ = vars(module)
    service.model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="Nothing was changed"):
        release(service)
    release([service, nn.Linear(4, 4)])
    assert module.kept == 1
    assert module.model(INPUTS).shape == (1, 4)


def test_memory_behind_many_objects_is_found() -> None:
    for names in (("many", "inner"), ("inner", "many")):
        service, inner = App(), App()
        inner.model = nn.Linear(4, 4)
        parts = {"many": [[{"id": n, "tags": []}] for n in range(60_000)], "inner": inner}
        for name in names:
            setattr(service, name, parts.pop(name))
        storages = weak(inner.model)
        del inner
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
    """It is not needed if a variable refers to the memory, or a live optimizer does."""
    for is_held in (False, True):
        model = nn.Sequential(nn.Linear(1000, 1000))
        local = model[0] if is_held else None
        with without_collector(), garbage_collections() as generations:
            assert bool(release(model).still_held) == is_held
        assert 2 not in generations
        del local
    model = nn.Sequential(nn.Linear(1000, 1000))
    trainer = App()
    trainer.app, trainer.data = trainer, [model[0]]  # A cycle that nothing else refers to.
    with without_collector(), garbage_collections() as generations:
        del trainer
        gc.collect(0), gc.collect(1)
        trainer = App()
        trainer.app, trainer.data = trainer, [model[0]]
        gc.collect(0), gc.collect(1)  # Old garbage, which young collections do not find.
        storages = weak(model)
        del trainer
        assert release(model).still_held == ()
    assert gone(storages)
    assert 2 in generations


def test_object_is_emptied_whose_only_model_is_passed_too() -> None:
    for order in (
        lambda s: (s, s.model),
        lambda s: ([s.model], s),
        lambda s: {"a": s.model, "b": s},
    ):
        service = App()
        service.model = nn.Linear(4, 4)
        storages = weak(service.model)
        passed = order(service)
        assert release(*(passed if type(passed) is tuple else (passed,))).errors == ()
        assert gone(storages)
        with pytest.raises(ReleasedError):
            _ = service.model


def test_hook_in_a_live_model_raises_once_its_owner_is_released() -> None:
    class Recorder:
        def __init__(self, layer: nn.Module) -> None:
            self.seen: list[torch.Tensor] = []
            layer.register_forward_hook(self.record)

        def record(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
            self.seen.append(output.detach())

    model = nn.Sequential(nn.Linear(4, 4))
    recorder = Recorder(model[0])
    model(INPUTS)
    storages = weak(*recorder.seen)
    release(recorder)
    assert gone(storages)
    with pytest.raises(ReleasedError, match="this Recorder was released"):
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
    class Settings:
        pass

    settings, extractor = Settings(), Settings()
    settings.registry = REGISTRY
    extractor.filters = pytest.importorskip("numpy").ones(10)
    REGISTRY["model"] = nn.Linear(4, 4)
    try:
        release([nn.Linear(4, 4), settings, {"extractor": extractor}])
        assert (settings.registry, extractor.filters.sum()) == (REGISTRY, 10)
        assert REGISTRY["model"](INPUTS).shape == (1, 4)
    finally:
        REGISTRY.clear()
