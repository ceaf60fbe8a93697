"""The search for holders runs no code of the program, and changes nothing of it.

Each test has its control: what the search would do if it asked in the ordinary way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from programs import assert_clean, run
from torch_utils import release
from torch_utils._releasing.holders import find_holders
from torch_utils._releasing.storages import Inventory

LONG = 10.0
pytestmark = pytest.mark.usefixtures("only_own_frames")


def search(*tensors: torch.Tensor) -> list[str]:
    """Search for the holders of tensors that are alive, and return what was found."""
    inventory = Inventory()
    for tensor in tensors:
        inventory.add("", "tensor", tensor)
    survivors = inventory.alive()
    found = find_holders(torch, survivors, LONG)
    return [name for held in survivors for name in found.of(held)]


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4
def test_a_checkpoint_is_not_computed_again() -> None:
    """A checkpointed loss saves what its forward pass would have to run again for."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    loss = checkpoint(model, torch.ones(3, 4, requires_grad=True), use_reentrant=False).sum()
    before = (len(runs), int(model[1].num_batches_tracked))
    assert "an autograd graph" in search(model[0].weight)
    assert (len(runs), int(model[1].num_batches_tracked)) == before
    node = loss.grad_fn.next_functions[0][0]
    _ = node._saved_result1  # The control.
    assert (len(runs), int(model[1].num_batches_tracked)) != before


@pytest.mark.slow
def test_hooks_that_unpack_are_not_run() -> None:
    """What a graph has saved stays packed; that there is a graph is said."""
    unpacked: list[str] = []

    def unpack(tensor: Any) -> Any:
        unpacked.append("unpacked")
        return tensor

    def lose(model: nn.Module) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return model(torch.ones(3, 5, requires_grad=True)).sum()

    # Frozen: no node of the graph is there to accumulate its gradient, and so name it.
    model = nn.Linear(5, 5, bias=False).requires_grad_(False)
    my_loss = lose(model)
    (held,) = release(model, search_s=LONG).still_held
    assert held.holders == (
        "perhaps an autograd graph (reached from the variable 'my_loss' of "
        "test_hooks_that_unpack_are_not_run())",
    )
    assert unpacked == []
    _ = my_loss.grad_fn.next_functions[0][0]._saved_mat2  # The control.
    assert unpacked == ["unpacked"]


def test_the_context_of_a_custom_function() -> None:
    """What a function of the program's own keeps beside the graph is found, by C++ alone."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            ctx.kept = kept
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

        @property
        def saved_tensors(self) -> Any:
            raise AssertionError("this would unpack")

    model = nn.Linear(5, 5, bias=False).requires_grad_(False)
    result = Doubled.apply(torch.ones(3, requires_grad=True), model.weight)
    (held,) = release(model, search_s=LONG).still_held
    assert held.holders == ("an autograd graph",)
    del result


ASKED: list[str] = []


def noting(name: str, answer: Callable[..., Any]) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        ASKED.append(name)
        return answer(*args, **kwargs)

    return method


class Meta(type):
    __hash__ = noting("type.__hash__", lambda kind: 1)
    __eq__ = noting("type.__eq__", lambda kind, other: kind is other)
    __name__ = property(noting("type.__name__", lambda kind: "Other"))
    __module__ = property(noting("type.__module__", lambda kind: "other"))
    __instancecheck__ = noting("__instancecheck__", lambda kind, thing: True)
    __subclasscheck__ = noting("__subclasscheck__", lambda kind, other: True)


class Curious:
    """Notes whatever is asked of it."""

    __hash__ = noting("__hash__", lambda self: 1)
    __eq__ = noting("__eq__", lambda self, other: self is other)
    __len__ = noting("__len__", lambda self: 0)
    __bool__ = noting("__bool__", lambda self: True)
    __repr__ = noting("__repr__", lambda self: "?")
    __str__ = noting("__str__", lambda self: "?")
    __format__ = noting("__format__", lambda self, how: "?")
    __iter__ = noting("__iter__", lambda self: iter(()))
    __getattr__ = noting("__getattr__", lambda self, name: None)
    __getattribute__ = noting("__getattribute__", object.__getattribute__)
    __class__ = property(noting("__class__", lambda self: dict))


class CuriousObject(Curious, metaclass=Meta):
    pass


class CuriousList(Curious, list, metaclass=Meta):
    pass


class CuriousDict(Curious, dict, metaclass=Meta):
    values = noting("values", lambda self: [])
    items = noting("items", lambda self: [])


class CuriousError(Curious, Exception):
    args = property(noting("args", lambda self: ()))
    __cause__ = property(noting("__cause__", lambda self: None))
    exceptions = property(noting("exceptions", lambda self: ()))


class CuriousName(str):
    __str__ = noting("__str__", lambda self: "?")
    __format__ = noting("__format__", lambda self, how: "?")
    __repr__ = noting("__repr__", lambda self: "?")
    startswith = noting("startswith", lambda self, *start: False)


class CuriousTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        ASKED.append(f"__torch_function__ {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A subclass that wraps another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        ASKED.append("__tensor_flatten__")
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        ASKED.append(f"__torch_dispatch__ {function}")
        raise NotImplementedError


def in_an_object(tensor: torch.Tensor) -> Any:
    thing = CuriousObject()
    object.__setattr__(thing, "tensor", tensor)
    return thing


def in_an_error(tensor: torch.Tensor) -> Any:
    error = CuriousError()
    BaseException.__setattr__(error, "tensor", tensor)
    return error


def as_default(tensor: torch.Tensor) -> Any:
    def function(tensor: Any = tensor) -> None: ...

    function.__qualname__ = CuriousName("function")
    return function


def in_a_numpy_array(tensor: torch.Tensor) -> Any:
    numpy = pytest.importorskip("numpy", reason="needs numpy")

    class Array(numpy.ndarray):
        base = property(noting("base", lambda self: None))

    return tensor.numpy().view(Array)


PLACES = {
    "object": in_an_object,
    "list": lambda tensor: CuriousList([tensor]),
    "dict": lambda tensor: CuriousDict(x=tensor),
    "error": in_an_error,
    "default": as_default,
    "tensor": lambda tensor: tensor.as_subclass(CuriousTensor),
    "wrapper": Wrapper,
    "array": in_a_numpy_array,
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_asked(place: str) -> None:
    """Whatever holds the tensor is not asked anything, and the tensor is found in it."""

    def hold() -> Iterator[Any]:
        tensor = torch.ones(50)
        my_holder = PLACES[place](tensor)
        inventory = Inventory()
        inventory.add("", "tensor", tensor)
        yield inventory.alive()
        del tensor  # Only the holder has it from here on.
        yield
        del my_holder

    holder = hold()
    survivors = next(holder)
    next(holder)
    ASKED.clear()
    found = find_holders(torch, survivors, LONG)
    assert ASKED == []
    assert found.explain(survivors), place


def test_the_curious_notice_questions() -> None:
    """The control: ordinary questions are noticed by each of them."""
    for ask in (hash, len, iter, repr, lambda thing: isinstance(thing, dict)):
        ASKED.clear()
        ask(CuriousObject())
        assert ASKED, ask
    for ask in (lambda: CuriousObject in {1: 2}, lambda: CuriousObject.__name__):
        ASKED.clear()
        ask()
        assert ASKED, ask
    ASKED.clear()
    _ = torch.ones(3).as_subclass(CuriousTensor).is_leaf
    assert ASKED


@pytest.mark.parametrize("mode", [TorchFunctionMode, TorchDispatchMode])
def test_modes_see_nothing(mode: Any) -> None:
    """A mode that watches all of torch is not called by the search."""

    class Watching(mode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            ASKED.append(str(function))
            return function(*args, **(kwargs or {}))

        __torch_dispatch__ = __torch_function__

    weight = torch.ones(5, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    loss = (weight * 2).sum()
    inventory = Inventory()
    inventory.add("", "weight", weight)
    survivors = inventory.alive()
    with Watching():
        ASKED.clear()
        find_holders(torch, survivors, LONG)
        assert ASKED == []
        sparse._values()  # The control.
        assert ASKED
    del loss


def test_what_locals_returned_stays_as_it_is() -> None:
    """The dictionary that `locals()` gave the program is the program's."""
    weight = torch.ones(5)
    count = 1
    variables = locals()
    count = 2
    assert search(weight)
    assert variables["count"] == 1
    if sys.version_info < (3, 13):
        _ = sys._getframe().f_locals  # The control.
        assert variables["count"] == count


def test_variables_of_traced_functions_are_not_lost() -> None:
    """A debugger that looks at a function, and releases something meanwhile, breaks nothing."""
    answers: list[Any] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "traced":
            answers.append(search(torch.ones(3)))
            return trace
        return None

    def traced() -> tuple[int, str]:
        number = 1
        word = "w"
        number += 1
        return number, word

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = traced()
    finally:
        sys.settrace(before)
    assert result == (2, "w")
    assert answers


@pytest.mark.slow
def test_a_lazy_torch_is_not_imported() -> None:
    """What only looks does not touch a lazy module, any attribute of which would import it."""
    program = """
    import importlib.util, sys
    spec = importlib.util.find_spec("torch")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    torch = importlib.util.module_from_spec(spec)
    sys.modules["torch"] = torch
    spec.loader.exec_module(torch)
    import torch_utils
    from torch_utils import SafePyTorchCleanup
    torch_utils.memory_snapshot()
    torch_utils.safe_cuda_empty_cache()
    torch_utils.is_out_of_memory(RuntimeError("x"))
    torch_utils.release([])
    with torch_utils.measuring():
        pass
    with SafePyTorchCleanup(open("/dev/null")):
        pass
    assert "torch._C" not in sys.modules
    assert type(torch).__name__ == "_LazyModule"
    torch.ones  # The control: this does import it, and then it is seen.
    assert "torch._C" in sys.modules
    assert str(torch_utils.release(torch.ones(1000))).startswith("freed 4.0 kB")
    """
    assert_clean(run(program))
