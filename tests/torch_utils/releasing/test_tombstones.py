"""Tests of released objects of all kinds of classes: each use raises an error that says so."""

# Misuses things on purpose.
# mypy: disable-error-code="attr-defined, misc, no-untyped-def, union-attr"

import abc
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import BaseModel, PrivateAttr
from torch import nn

from tests.support.releasing import gone, weak
from torch_utils import ReleasedError, release

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Embedding(BaseModel):
    """As the embeddings of LangChain and LlamaIndex."""

    model_config = {"arbitrary_types_allowed": True}
    model: Any = None
    _model: Any = PrivateAttr(default=None)


class Slots:
    __slots__ = ("model",)


class SlotsAndDictionary(Slots):
    pass


class AbstractSlots(abc.ABC):
    __slots__ = ("model",)


class Encoder(typing.Protocol):
    def encode(self) -> Any: ...


class EncoderOf(Encoder):
    def encode(self) -> Any:
        return self.model


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    model: Any


class Plugin:
    __slots__ = ()
    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str) -> None:
        Plugin.known.append(kind)


class PluginEmbedder(Plugin, kind="a"):
    pass


class PluginSlots(Plugin, kind="b"):
    __slots__ = ("model",)


class Failure(Exception):
    pass


def with_attribute(kind: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        made = kind()
        object.__setattr__(made, "model", model)
        return made

    return make


def embedding(model: Any) -> Any:
    made = Embedding(model=model)
    made._model = model
    return made


PLAIN = (
    *(Slots, SlotsAndDictionary, AbstractSlots, EncoderOf),
    *(PluginEmbedder, PluginSlots, Failure),
)
KINDS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: with_attribute(kind) for kind in PLAIN},
    "pydantic": embedding,
    "frozen": Frozen,
}


@pytest.mark.parametrize("kind", KINDS)
def test_use_of_a_released_object_raises_released_error(kind: str) -> None:
    model = nn.Linear(4, 4)
    thing, other = KINDS[kind](model), KINDS[kind](nn.Linear(4, 4))
    storages, known, former = weak(model), [*Plugin.known], type(thing)
    del model
    assert release(thing).freed_bytes == {"host": 80}
    assert gone(storages)
    says = rf"this {former.__name__} was released at .*{__name__.split('.')[-1]}"
    for use in (lambda: thing.model, lambda: thing.encode(), lambda: thing()):
        with pytest.raises(ReleasedError, match=says):
            use()
    assert isinstance(thing, former) and repr(thing) == f"<released this {former.__name__}>"
    assert known == Plugin.known, "a tombstone is not a plug-in"
    assert release(other).freed_bytes == {"host": 80}


def test_destructor_of_a_module_with_slots_runs_once() -> None:
    class Slotted(nn.Module):
        __slots__ = ("extra",)

        def __del__(self) -> None:
            seen.append(hasattr(self, "extra"))

    seen: list[bool] = []
    module = Slotted()
    module.extra = nn.Linear(2, 2)
    release(module)
    del module
    assert seen == [True]


class Borg:
    """Its objects share one dictionary."""

    shared: typing.ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


def test_of_objects_that_share_a_dictionary_only_the_released_one_is_empty() -> None:
    first, second = Borg(), Borg()
    first.model, first.rate = nn.Linear(4, 4), 0.1
    report = release(first)
    (held,) = report.still_held
    assert (held.what, held.nbytes) == ("Borg.__dict__", 80)
    assert second.model(torch.ones(4)).shape == (4,)
    assert vars(Borg()) is Borg.shared and sorted(Borg.shared) == ["model", "rate"]
    with pytest.raises(ReleasedError):
        _ = first.rate
    Borg.shared.clear()


class AttrDict(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


def test_containers_stay_containers() -> None:
    settings = AttrDict(model=nn.Linear(4, 4), rate=0.1)
    storages = weak(settings["model"])
    assert release(settings).errors == ()
    assert gone(storages)
    assert (settings["rate"], settings.rate, sorted(settings)) == (0.1, 0.1, ["model", "rate"])
    with pytest.raises(ReleasedError, match="this Linear was released"):
        settings["model"](torch.ones(4))


def test_namespaces_of_modules_stay() -> None:
    module = types.ModuleType("plugin")
    exec("class Plugin: pass", vars(module))
    module.model, thing = nn.Linear(4, 4), Borg()
    with pytest.raises(TypeError, match=r"It has all variables of a module: pass the models"):
        release(vars(module))
    thing.__dict__ = vars(module)
    release([vars(module), thing, nn.Linear(4, 4)])
    assert module.model(torch.ones(4)).shape == (4,)
