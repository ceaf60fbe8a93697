"""SafePyTorchCleanup: everything is released at the end, and the user's exception wins."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

from programs import assert_clean, run
from torch_utils import (
    CleanupError,
    ReleasedError,
    Resource,
    SafePyTorchCleanup,
    TorchUtilsError,
    release,
)


def failing(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


def test_releases_last_in_first_out() -> None:
    """Managed objects and callbacks in reverse order; the report says what was freed."""
    order: list[str] = []
    model = nn.Linear(16, 16)
    with SafePyTorchCleanup(model) as scope:
        assert scope.report is None
        tensor = scope.manage(torch.ones(100))
        assert scope.callback(order.append, "first") == order.append
        scope.callback(order.append, "second")
    assert order == ["second", "first"]
    assert tensor.numel() == 0
    assert scope.report.freed_bytes == {"host": 4 * (16 * 16 + 16 + 100)}
    with pytest.raises(ReleasedError):
        model(torch.ones(1, 16))


def test_manage_with_a_closer() -> None:
    """A closer is called, with the object if it needs an argument."""

    class Pool:
        stopped = 0

        def stop(self) -> None:
            self.stopped += 1

    with SafePyTorchCleanup() as scope:
        one = scope.manage(Pool(), close=Pool.stop)
        two = Pool()
        assert scope.manage(two, close=two.stop) is two
        three = scope.manage(Pool(), close=lambda pool: pool.stop())
    assert (one.stopped, two.stopped, three.stopped) == (1, 1, 1)


def test_the_exception_of_the_block_wins() -> None:
    """It is the same object, with a note for each failure, which is logged once too."""
    error = KeyError("mine")
    scope = SafePyTorchCleanup(strict=True)
    with pytest.raises(KeyError) as caught, scope:
        scope.callback(failing(ValueError("cleanup")))
        scope.callback(failing(KeyboardInterrupt()))
        raise error
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert sum("also failed" in note for note in error.__notes__) == 2


def test_errors_are_reported_logged_and_skip_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Without strict, an error is in the report and in the log, and the rest is released."""
    with SafePyTorchCleanup() as scope:
        tensor = scope.manage(torch.ones(10))
        scope.callback(failing(ValueError("no")))
    assert tensor.numel() == 0
    assert [str(e) for e in scope.report.errors] == ["no"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_strict_raises_a_group() -> None:
    """With strict, all failures come as one group after everything was released."""
    tensor = torch.ones(10)
    with pytest.raises(CleanupError, match="2 steps of the cleanup failed") as caught:
        with SafePyTorchCleanup(tensor, strict=True) as scope:
            scope.callback(failing(ValueError("a")))
            scope.callback(failing(OSError("b")))
    assert tensor.numel() == 0
    assert {type(e) for e in caught.value.exceptions} == {ValueError, OSError}
    if sys.version_info >= (3, 11):
        assert caught.value.subgroup(OSError).exceptions[0].args == ("b",)


def test_interrupt_arrives_after_the_rest() -> None:
    """KeyboardInterrupt out of one step is raised when all the others have run."""
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt), SafePyTorchCleanup() as scope:
        scope.callback(order.append, "ran")
        scope.callback(failing(KeyboardInterrupt()))
    assert order == ["ran"]


def test_bad_arguments() -> None:
    """Mistakes are errors when they are made, and outside of a block there is no scope."""
    with pytest.raises(TypeError, match=r"^SafePyTorchCleanup\(\) does not know how"):
        SafePyTorchCleanup(object())
    with pytest.raises(ValueError, match="collect must be"):
        SafePyTorchCleanup(collect="maybe")  # type: ignore[arg-type]
    scope = SafePyTorchCleanup()
    for use in (lambda: scope.manage(torch.ones(1)), lambda: scope.callback(print)):
        with pytest.raises(TorchUtilsError, match="not open; use it inside its with block"):
            use()
    with scope, pytest.raises(TypeError, match=r"^manage\(\) does not know how"):
        scope.manage(object())


def test_decorator_of_a_function() -> None:
    """Each call is a use; metadata and results are the function's."""
    scope = SafePyTorchCleanup()

    @scope
    def work(size: int) -> torch.Tensor:
        """Work."""
        return scope.manage(torch.ones(size))

    assert work(3).numel() == 0
    assert work.__doc__ == "Work."
    assert scope.report.freed_bytes == {"host": 12}


def test_decorator_of_generators() -> None:
    """The scope is open while the generator runs, and closed however it ends."""
    scope = SafePyTorchCleanup()
    tensors: list[torch.Tensor] = []

    @scope
    def numbers() -> Any:
        tensors.append(scope.manage(torch.ones(5)))
        got = yield 1
        yield got
        return "end"

    generator = numbers()
    assert next(generator) == 1
    assert tensors[0].numel() == 5
    assert generator.send("sent") == "sent"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert (stop.value.value, tensors[0].numel()) == ("end", 0)
    unfinished = numbers()
    next(unfinished)
    unfinished.close()
    assert tensors[1].numel() == 0


def test_restore_flags() -> None:
    """torch's switches are as before, also after an error; untouched ones are not touched."""
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    with pytest.raises(ValueError, match="mine"), SafePyTorchCleanup(restore_flags=True):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device("meta")
        raise ValueError("mine")
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before
    assert torch.backends.cudnn.benchmark is False
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.ones(1).device.type == "cpu"
    assert getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None


def test_flags_stay_without_restore() -> None:
    """Negative control: by default nothing is put back."""
    with SafePyTorchCleanup():
        torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = False


def test_nested_reports_count_once() -> None:
    """What a resource releases itself is in the scope's report, once."""

    class Owner(Resource):
        def __init__(self) -> None:
            self.tensor = torch.ones(1000)

        def _release(self) -> None:

            release(self.tensor)

    with SafePyTorchCleanup() as scope:
        scope.manage(Owner())
        scope.manage(torch.ones(10))
    assert scope.report.freed_bytes == {"host": 4040}


def test_open_scope_is_closed_at_exit() -> None:
    """In order with resources, whoever has forgotten it; weights are left to the system."""
    result = run("""
    from torch_utils import Resource, SafePyTorchCleanup

    class R(Resource):
        def __init__(self, name): self.name = name
        def _release(self): print(self.name, flush=True)

    first = R("first")
    SafePyTorchCleanup().__enter__().callback(print, "scope", flush=True)
    last = R("last")

    def suspended():
        with SafePyTorchCleanup() as scope:
            scope.callback(print, "generator", flush=True)
            yield
    kept = suspended(); next(kept)
    """)
    assert_clean(result)
    assert result.stdout == "generator\nlast\nscope\nfirst\n"


def test_decorator_without_parentheses() -> None:
    """The error says what is missing, and not that a function cannot be released."""
    with pytest.raises(TypeError, match=r"@SafePyTorchCleanup\(\), with parentheses"):

        @SafePyTorchCleanup
        def function() -> None: ...
