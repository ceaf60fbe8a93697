"""Tests of the close() methods and destructors of modules."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, assignment, misc, operator, var-annotated"

import logging
import traceback
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.releasing import gone, weak
from torch_utils import ReleasedError, Resource, release

pytestmark = pytest.mark.usefixtures("frozen_heap")

Log = list[tuple[str, str, int]]
LOCALS: list[Any] = []
"""The storages of local variables of calls that have failed."""


class Part(nn.Linear):
    """Records its calls and the number of its weights at each call."""

    def __init__(self, name: str, log: Log, *children: Any, fail: Any = None) -> None:
        super().__init__(2, 2)
        self.name, self.log, self.fail = name, log, fail
        for index, child in enumerate(children):
            self.add_module(str(index), child)

    def close(self) -> None:
        self.log.append((self.name, "close", self.weight.numel()))
        if self.fail is not None:
            local = torch.ones(10)
            LOCALS.extend(weak(local))
            raise self.fail

    def __del__(self) -> None:
        self.log.append((self.name, "del", self.weight.numel()))


def test_close_and_destructor_run_once_on_the_whole_object() -> None:
    """Those of a part run when Python drops it, or not, because something else uses it."""
    log: Log = []
    shared = Part("shared", log)
    model = Part("top", log, shared, Part("inner", log))
    release(model, model)
    assert log == [("top", "close", 4), ("top", "del", 4), ("inner", "del", 4)]
    release(model)
    del model
    assert len(log) == 3
    release(shared)
    assert log[3:] == [("shared", "close", 4), ("shared", "del", 4)]


@pytest.mark.parametrize("drops", [False, True])
def test_object_with_close_and_a_model_is_closed_and_released(drops: bool) -> None:
    """Its destructor runs once, also if `close()` has dropped the model."""

    class Encoder:
        def __init__(self) -> None:
            self.model: Any = nn.Linear(2, 2)
            self.table = torch.ones(10)

        def close(self) -> None:
            seen.append(self.model.weight.numel() + self.table.numel())
            if drops:
                self.model = None

        def __del__(self) -> None:
            seen.append("destructor")

    seen: list[Any] = []
    encoder = Encoder()
    storages = weak(encoder.model, encoder.table)
    report = release(encoder)
    assert (report.freed_bytes, report.errors) == ({"host": 24 + 40}, ())
    del encoder
    assert seen == [14, "destructor"]
    assert gone(storages)


def test_object_with_a_function_that_loads_a_model_is_only_closed() -> None:
    """The function refers to what it needs, which belongs to the program."""

    class Lender:
        def __init__(self, load: Any) -> None:
            self.load, self.is_open = load, True

        def close(self) -> None:
            self.is_open = False

    encoder = nn.Linear(2, 2)
    lender = Lender(lambda: nn.Sequential(encoder))
    assert release(lender).errors == ()
    assert lender.is_open is False
    assert lender.load()(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_of_close_are_reported_without_their_frames(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    model = [Part("bad", log, fail=error("no")), Part("good", log)]
    storages = weak(*model)
    tensor = torch.ones(3)
    caplog.set_level(logging.ERROR, "torch_utils")
    if error is ValueError:
        (found,) = release(model, tensor).errors
        assert str(found) == "no" and "in close" in "".join(traceback.format_exception(found))
    else:
        with pytest.raises(error, match="no"):
            release(model, tensor)
    assert gone([*storages, *LOCALS])
    assert tensor.numel() == 0
    assert [name for name, _, _ in log] == ["bad", "bad", "good", "good"]
    assert [r.getMessage() for r in caplog.records] == [
        f"releasing Part.close() failed: {error('no')!r}"
    ]


class Child(nn.Linear, Resource):
    """A Resource that is also a module."""

    seen: Any = None
    fail: Any = None

    def _release(self) -> None:
        self.seen.append(self.weight.numel())
        if self.fail:
            raise self.fail


@pytest.mark.parametrize("fail", [None, ValueError("no"), SystemExit("no")])
def test_module_that_is_a_resource_is_closed_once(
    fail: Any, caplog: pytest.LogCaptureFixture
) -> None:
    child, seen = Child(2, 2), []
    child.seen, child.fail = seen, fail
    if isinstance(fail, SystemExit):
        with pytest.raises(SystemExit):
            release([child])
    else:
        assert release(child).errors == ((fail,) if fail else ())
    assert seen == [4]
    with pytest.raises(ReleasedError):
        child(torch.ones(1, 2))
    assert child.close() is None
    del child  # Warns if it were still open.
    assert seen == [4]
    assert sum("failed" in r.getMessage() for r in caplog.records) <= (2 if fail else 0)


async def to_await(*_: object) -> None: ...


class Awaited(nn.Linear):
    close = to_await


def test_close_that_returns_a_coroutine_is_an_error() -> None:
    model = Awaited(2, 2)
    for thing in (model, types.SimpleNamespace(close=lambda: to_await())):
        (error,) = release(thing).errors
        assert str(error).startswith("to_await() has to be awaited")
    assert repr(model).startswith("<released")


def test_object_that_cannot_be_closed_stays_whole() -> None:
    """It may be in use, such as a host with a lease. Another try may succeed."""

    class Service:
        def __init__(self) -> None:
            self.model, self.is_busy = nn.Linear(2, 2), True

        def close(self) -> None:
            if self.is_busy:
                raise RuntimeError("in use")

    service, other = Service(), nn.Linear(2, 2)
    storages = weak(service.model)
    for _ in range(2):
        (error,) = release(service, other).errors
        assert str(error) == "in use"
    assert service.model(torch.ones(2)).shape == (2,)
    with pytest.raises(ReleasedError):
        other(torch.ones(2))
    service.is_busy = False
    assert release(service).errors == ()
    assert gone(storages)


def test_array_that_lent_its_memory_keeps_it() -> None:
    array = np.ones(1_000_000, np.float32)
    report = release(torch.from_numpy(array))
    assert (report.total_freed_bytes, report.lent_bytes) == (0, 4_000_000)
    assert "returned 4.0 MB to the array or file that had lent them" in str(report)
    assert array.sum() == 1_000_000
    tensor = torch.from_numpy(np.ones(10_000_000, np.float32))  # The last reference to the array.
    report = release(tensor)
    assert (report.total_freed_bytes, report.lent_bytes) == (40_000_000, 0)
