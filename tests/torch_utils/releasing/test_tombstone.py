"""A tombstone can be looked at by anybody, and used by nobody."""

from __future__ import annotations

import abc
import collections.abc
import copy
import inspect
import io
import logging
import pdb
import pickle
import pprint
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import pytest
import rich
import rich.pretty
import torch
from torch import nn

from programs import assert_clean, run_forked
from torch_utils import ReleasedError, Resource, release
from torch_utils._releasing.tombstone import bury


def released() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    release(model)
    return model


@runtime_checkable
class Encoder(Protocol):
    name: str

    def encode(self, text: str) -> list[float]: ...


LOOKS = {
    "truth": bool,
    "hasattr": lambda m: hasattr(m, "weight"),
    "getattr": lambda m: getattr(m, "weight", None),
    "protocol": lambda m: isinstance(m, Encoder),
    "callable": callable,
    "dir": dir,
    "vars": vars,
    "members": inspect.getmembers,
    "static": lambda m: inspect.getattr_static(m, "weight", None),
    "signature": inspect.signature,
    "awaitable": inspect.isawaitable,
    "repr": repr,
    "format": lambda m: f"{m} {m!s} {m!r}",
    "logging": lambda m: logging.getLogger("x").info("%s", m),
    "pprint": pprint.pformat,
    "pdb": lambda m: _debug(m),
    "rich": lambda m: rich.print(m, {"model": m}, file=io.StringIO()),
    "rich inspect": lambda m: rich.inspect(
        m, all=True, console=rich.console.Console(file=io.StringIO())
    ),
    "rich pretty": lambda m: rich.pretty.pretty_repr([m]),
    "notebook": lambda m: getattr(m, "_repr_html_", None),
    "numpy": np.asarray,
    "equal": lambda m: (m == m, m != m, m == 1),
    "hash": lambda m: {m: 1},
    "module": lambda m: m.__module__,
    "weakref": lambda m: weakref.WeakKeyDictionary({m: 1}),
    "sizeof": sys.getsizeof,
    "isinstance": lambda m: isinstance(m, (nn.Module, collections.abc.Iterable)),
    "try": lambda m: _tried(m),
}


def _tried(model: Any) -> None:
    try:
        model.weight.cpu()
    except AttributeError:
        pass


def _debug(model: Any) -> None:
    output = io.StringIO()
    commands = "\n".join(["pp x", "p x.weight", "display x", "a", "whatis x", "n", "c"])
    debugger = pdb.Pdb(
        stdin=io.StringIO(commands + "\n"), stdout=output, readrc=False, nosigint=True
    )
    debugger.use_rawinput = False
    debugger.runcall(lambda x: x is None, model)
    assert "<released this Sequential>" in output.getvalue()


@pytest.mark.parametrize("look", LOOKS)
def test_can_be_looked_at(look: str) -> None:
    """What destructors, debuggers and pretty-printers do with an object raises nothing."""
    LOOKS[look](released())


def test_answers() -> None:
    """It was there, it has nothing, and it is what it was."""
    model = released()
    assert model
    assert not hasattr(model, "weight")
    assert getattr(model, "weight", 3) == 3
    assert not isinstance(model, Encoder)
    assert isinstance(model, nn.Sequential)
    assert model.__module__ == nn.Sequential.__module__
    assert rich.pretty.pretty_repr([model]) == "[<released this Sequential>]"
    assert str(model) == repr(model) == "<released this Sequential>"
    assert all(hasattr(model, name) for name in dir(model))


def test_control_an_error_of_another_type() -> None:
    """An object whose attributes raise what is no AttributeError fails the same looks."""

    class Rude:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("released")

        __bool__ = __len__ = lambda self: self.x

    failed = []
    for name in ("truth", "hasattr", "getattr", "protocol", "members", "try"):
        try:
            LOOKS[name](Rude())
        except RuntimeError:
            failed.append(name)
    assert failed == ["truth", "hasattr", "getattr", "protocol", "members", "try"]


def test_reading_an_attribute_names_the_module() -> None:
    """It is a ReleasedError all the same, without a suggestion of what it has instead."""
    model = released()
    for use in (lambda: model.weight, lambda: model.encode("x"), lambda: setattr(model, "a", 1)):
        with pytest.raises(ReleasedError, match="this Sequential was released at") as caught:
            use()
        assert isinstance(caught.value, AttributeError)
        assert caught.value.name is None
    for use in (copy.copy, copy.deepcopy, pickle.dumps, len, list, lambda m: m[0], lambda m: m(1)):
        with pytest.raises(ReleasedError, match="was released") as caught:
            use(model)
        assert not isinstance(caught.value, AttributeError)


class Odd(abc.ABC, nn.Module):
    """Of a layout of its own, with methods that would fail on what is empty."""

    __slots__ = ("extra",)
    heirs: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        Odd.heirs.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.ones(3)
        self.layer = nn.Linear(2, 2)

    def __len__(self) -> int:
        return self.layer.weight.numel()

    __hash__ = __len__

    def __eq__(self, other: object) -> bool:
        return self.layer is other.layer

    def __str__(self) -> str:
        return str(self.layer)

    def __rich_repr__(self) -> Any:
        yield self.layer


def test_heir_of_a_layout() -> None:
    """The methods of a former class do not come back through its heir, nor do they hear of it."""
    odd, kept = Odd(), torch.ones(1)
    odd.extra = kept
    count = sys.getrefcount(kept)
    release(odd, Odd())
    assert sys.getrefcount(kept) == count - 1
    assert Odd.heirs == []
    assert str(odd) == f"{odd}" == "<released this Odd>"
    assert odd
    assert odd == odd
    assert odd in {odd}
    assert getattr(odd, "extra", None) is None
    rich.print(odd, file=io.StringIO())
    assert len(type.__subclasses__(Odd)) == 1
    assert not issubclass(type("Later", (Odd,), {}), type(odd))
    assert issubclass(type("Latest", (Odd,), {}), Odd)
    with pytest.raises(ReleasedError, match="this Odd was released"):
        odd.layer
    with pytest.raises(ReleasedError, match="this Odd was released"):
        len(odd)


def test_closing_what_is_gone() -> None:
    """A second close, and the end of a block, are no uses of an object that had them."""

    class Model(nn.Linear, Resource):
        def _release(self) -> None:
            release(self)

    with Model(2, 2) as model:
        release(model)
    model.close()
    assert model.closed
    assert not hasattr(released(), "close")
    with pytest.raises(ReleasedError), model:
        pass


PARENTS = {
    "call": lambda m: m(torch.ones(1, 4)),
    "parameters": lambda m: list(m.parameters()),
    "state_dict": lambda m: m.state_dict(),
    "load": lambda m: m.load_state_dict({}),
    "to": lambda m: m.to("cpu"),
    "half": lambda m: m.half(),
    "train": lambda m: m.train(),
    "property": lambda m: m.device,
}


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


@pytest.mark.parametrize("use", PARENTS)
def test_child_of_a_live_parent(use: str) -> None:
    """Whatever the parent needs its child for, the error names the child."""
    parent = Parent()
    PARENTS[use](Parent()) if use != "load" else None
    release(parent.child)
    with pytest.raises(ReleasedError, match="this Linear was released at"):
        PARENTS[use](parent)
    assert "released this Linear" in repr(parent)
    parent.child = nn.Linear(4, 4)
    assert parent(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.xdist_group("transformers")
def test_part_of_a_live_sentence_transformer(tiny_model: Path) -> None:
    """Its first part is asked in properties as well."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny_model), device="cpu")
    release(model[0])
    with pytest.raises(ReleasedError, match="this Transformer was released at"):
        model.encode("a city")


def test_readers_meet_the_tombstone_or_the_whole() -> None:
    """A thread that reads while another buries gets a ReleasedError, nothing else."""
    errors: list[BaseException] = []
    for _ in range(50):
        model = nn.Linear(2, 2)
        start = threading.Barrier(2)

        def read(model: Any = model, start: Any = start) -> None:
            start.wait()
            try:
                while True:
                    model.weight
                    model.in_features
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        start.wait()
        bury(model, "this Linear", "here")
        thread.join()
    assert {isinstance(error, ReleasedError) for error in errors} == {True}


def test_destructors_at_the_end() -> None:
    """A destructor that asks for a released model is quiet at every stage of a shutdown."""
    program = """
    import builtins, sys, torch
    from torch_utils import release

    class Owner:
        def __init__(self, model):
            self.model = model
        def __del__(self):
            if self.model and getattr(self, "model", None):
                if not hasattr(self.model, "weight"):
                    getattr(self.model, "to", None)
                    repr(self.model)

    model = torch.nn.Linear(2, 2)
    release(model)
    owner = Owner(model)
    builtins.keep = Owner(model)
    sys.keep = Owner(model)
    torch.keep = Owner(model)
    Owner(model)
    """
    assert_clean(run_forked(program))
