"""Tests of the close() methods and destructors of modules."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, assignment, misc, operator, var-annotated"

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


def test_object_with_close_and_a_model_is_closed_and_released() -> None:
    """Its destructor runs once. What `close()` has dropped counts, too."""

    class Encoder:
        def __init__(self) -> None:
            self.model: Any = nn.Linear(2, 2)
            self.table = torch.ones(10)

        def close(self) -> None:
            seen.append(self.model.weight.numel() + self.table.numel())
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

    encoder, closed = nn.Linear(2, 2), list[int]()
    lender = types.SimpleNamespace(
        load=lambda: nn.Sequential(encoder), close=lambda: closed.append(1)
    )
    assert release(lender).errors == ()
    assert closed == [1]
    assert lender.load()(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_of_close_are_reported_without_their_frames(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    log: Log = []
    model, tensor = [Part("bad", log, fail=error("no")), Part("good", log)], torch.ones(3)
    storages = weak(*model)
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


@pytest.mark.parametrize("errors", [(), (ValueError("no"),)])
def test_module_that_is_a_resource_is_closed_once(errors: tuple[Exception, ...]) -> None:
    class Child(nn.Linear, Resource):
        def _release(self) -> None:
            seen.append(self.weight.numel())
            for error in errors:
                raise error

    child, seen = Child(2, 2), []
    assert release(child).errors == errors
    with pytest.raises(ReleasedError):
        child(torch.ones(1, 2))
    assert child.close() is None
    del child  # Warns if it were still open.
    assert seen == [4]


def test_close_that_returns_a_coroutine_is_an_error() -> None:
    async def to_await() -> None: ...

    (error,) = release(types.SimpleNamespace(close=lambda: to_await())).errors
    assert "to_await() has to be awaited" in str(error)


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
