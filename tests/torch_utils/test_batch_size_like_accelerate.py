"""find_batch_size behaves as accelerate's decorator does, run beside it.

accelerate's wheel does not contain its own tests, so the behaviours that its documentation
promises are asked of both, in one run, and the answers compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_utils import find_batch_size

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def peer() -> Any:
    return pytest.importorskip(
        "accelerate.utils.memory", reason="needs accelerate"
    ).find_executable_batch_size


def both(peer: Any) -> list[Callable[..., Any]]:
    """List the two decorators, with ours at the factor of theirs."""
    factor = 0.9 if peer_multiplies(peer) else 0.5

    def ours(function: Any = None, **options: Any) -> Any:
        return find_batch_size(function, factor=factor, **options)

    return [peer, ours]


def peer_multiplies(peer: Any) -> bool:
    """Say whether this version of accelerate multiplies by 0.9; older ones halve."""
    tried: list[int] = []

    def work(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size == 100:
            raise RuntimeError("CUDA out of memory.")

    peer(work, starting_batch_size=100)()
    return tried[1] == 90


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error's type and text."""
    try:
        return call()
    except Exception as error:
        return type(error), " ".join(str(error).split())


ERRORS = {
    "cuda": RuntimeError("CUDA out of memory."),
    "xpu": RuntimeError("XPU out of memory."),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    "cpu": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("start", [128, 64, 7, 1])
@pytest.mark.parametrize("fits", [100, 8, 1])
def test_same_sizes(peer: Any, kind: str, start: int, fits: int) -> None:
    """The same sizes are tried, for each kind of lack of memory, and the last one is kept."""
    results = []
    for decorator in both(peer):
        tried: list[Any] = []

        @decorator(starting_batch_size=start)
        def work(batch_size: int, first: str, second: str = "") -> Any:
            tried.append((batch_size, first, second))
            if batch_size > fits:
                raise ERRORS[kind]
            return batch_size, first, second

        results.append([work("a", second="b"), work("c"), tried])
    assert results[0] == results[1]
    assert results[0][0][0] <= fits


@pytest.mark.parametrize("start", [0, 1, 16])
def test_same_end_when_nothing_fits(peer: Any, start: int) -> None:
    """Zero is reached, never tried, and said in the same words."""
    results = []
    for decorator in both(peer):
        tried: list[int] = []

        @decorator(starting_batch_size=start)
        def work(batch_size: int) -> None:
            tried.append(batch_size)
            raise RuntimeError("CUDA out of memory.")

        results.append((outcome(work), tried))
    assert results[0] == results[1]
    assert results[0][0][0] is RuntimeError


def test_same_refusal_of_a_batch_size(peer: Any) -> None:
    """Passing the batch size is refused with the same advice."""
    answers = []
    for decorator in both(peer):

        @decorator(starting_batch_size=128)
        def work(batch_size: int, first: str, second: str) -> None: ...

        kind, text = outcome(lambda: work(128, "hello", "world"))
        answers.append((kind, text.replace("called.Remove", "called. Remove")))
    assert answers[0] == answers[1]
    assert "`work(first=hello, second=world)`" in answers[0][1]


def test_same_errors_go_on(peer: Any) -> None:
    """What is not about memory is raised at once, as it is."""
    for error in (ValueError("oops"), RuntimeError("oops"), KeyError("CUDA out of memory.")):
        answers = []
        for decorator in both(peer):
            tried: list[int] = []

            @decorator
            def work(batch_size: int) -> None:
                tried.append(batch_size)
                raise error

            answers.append((outcome(work), tried))
        assert answers[0] == answers[1]
        assert answers[0][1] == [128]


def test_same_use_of_an_own_reduction(peer: Any) -> None:
    """The program's function says the next size, and is called without arguments."""
    answers = []
    for decorator in both(peer):
        sizes = iter([50, 20, 3])
        tried: list[int] = []

        @decorator(starting_batch_size=99, reduce_batch_size_fn=lambda: next(sizes))
        def work(batch_size: int) -> int:
            tried.append(batch_size)
            if batch_size > 5:
                raise RuntimeError("CUDA out of memory.")
            return batch_size

        answers.append((work(), tried))
    assert answers[0] == answers[1] == (3, [99, 50, 20, 3])


def test_the_default_differs_where_the_peer_multiplies(peer: Any) -> None:
    """The control: without the factor, the comparison does fail."""
    if not peer_multiplies(peer):
        pytest.skip("this version of accelerate halves as well")
    answers = []
    for decorator in (peer, find_batch_size):
        tried: list[int] = []

        @decorator
        def work(batch_size: int) -> None:
            tried.append(batch_size)
            if batch_size > 8:
                raise RuntimeError("CUDA out of memory.")

        work()
        answers.append(tried)
    assert answers[1] == [128, 64, 32, 16, 8]
    assert answers[0] != answers[1]
