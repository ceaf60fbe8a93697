"""Tests of the rule: what is passed is emptied, and what anything else refers to stays whole."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, list-item, misc, no-untyped-call"

from __future__ import annotations

import contextvars
import gc
import threading
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


def test_full_collection_runs_only_for_large_cycles() -> None:
    class Node(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(size, size)
            self.bound = self.layer.forward
            self.layer.owner = [self]

    for size, expected in ((4, 0), (1000, 1)):
        model = nn.Sequential(Node(size))
        storages = weak(model)
        gc.collect()
        with without_collector(), garbage_collections() as generations:
            release(model)
        assert generations.count(2) == expected
        assert gone(storages) == bool(expected)
    for collect in ("never", "young"):
        with without_collector(), garbage_collections() as generations:
            release(nn.Sequential(Node(1000)), collect=collect)
        assert 2 not in generations
    for is_held in (False, True):
        model = nn.Sequential(nn.Linear(1000, 1000))
        local = model[0] if is_held else None
        with without_collector(), garbage_collections() as generations:
            assert bool(release(model).still_held) == is_held
        assert 2 not in generations
        del local


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
