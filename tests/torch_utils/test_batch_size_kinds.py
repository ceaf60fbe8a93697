"""What find_batch_size decorates: coroutine functions, never generators, and the types it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import find_batch_size


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory.")


def test_coroutine_functions() -> None:
    """They are awaited; the failed try's tensor, in a coroutine's frame, is gone each time."""
    storages: list[StorageWeakRef] = []
    gone: list[bool] = []

    async def compute(batch_size: int) -> None:
        tensor = torch.ones(100 * batch_size)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        await asyncio.sleep(0)
        if batch_size > 2:
            out_of_memory()

    @find_batch_size(starting_batch_size=8)
    async def work(batch_size: int, text: str) -> str:
        """Say it."""
        gone.extend(storage.expired() for storage in storages[-1:])
        await compute(batch_size)
        return f"{text} {batch_size}"

    class Instance:
        async def __call__(self, batch_size: int) -> int:
            return batch_size if batch_size < 8 else out_of_memory()  # type: ignore[return-value]

    async def main() -> None:
        assert await work("x") == "x 2"
        assert gone == [True, True]
        assert await work("y") == "y 2"
        assert await find_batch_size(functools.partial(work.__wrapped__, text="z"), 4)() == "z 2"  # type: ignore[attr-defined]
        assert await find_batch_size(Instance(), 8)() == 4

    assert work.__doc__ == "Say it."
    asyncio.run(main())


def test_a_cancelled_coroutine_is_not_tried_again() -> None:
    """A cancellation goes on to the caller at once."""
    tried: list[int] = []

    @find_batch_size(starting_batch_size=8)
    async def work(batch_size: int) -> None:
        tried.append(batch_size)
        await asyncio.sleep(100)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        while not tried:
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert tried == [8]


def numbers(batch_size: int) -> Iterator[int]:
    yield batch_size


async def stream(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


class Numbers:
    def __call__(self, batch_size: int) -> Iterator[int]:
        yield batch_size


@pytest.mark.parametrize("function", [numbers, stream, functools.partial(numbers), Numbers()])
def test_generator_functions_are_refused(function: Callable[..., Any]) -> None:
    """Decorating one is an error, not a decorator that silently does nothing."""
    with pytest.raises(TypeError, match=r"cannot repeat .*a generator function"):
        find_batch_size(function)
    with pytest.raises(TypeError, match=r"cannot repeat .*a generator function"):
        find_batch_size(starting_batch_size=4)(function)


def test_a_coroutine_from_a_plain_function_is_refused() -> None:
    """Where only the call shows it, the call says what to decorate instead."""

    async def work(batch_size: int) -> None: ...

    with pytest.raises(TypeError, match="decorate the `async def` function itself"):
        find_batch_size(lambda batch_size: work(batch_size))()


TYPED = """
from torch_utils import find_batch_size

@find_batch_size(starting_batch_size=64)
def embed(batch_size: int, texts: list[str], *, normalize: bool = True) -> bytes:
    return b""

@find_batch_size
async def encode(batch_size: int, text: str) -> float:
    return 0.0

reveal_type(embed)
reveal_type(encode)
embed("one text")
embed(["texts"], normalise=True)
"""


@pytest.mark.slow
def test_types_of_what_is_decorated(tmp_path: Path) -> None:
    """Type checkers see the function's own arguments, without the first, and its result."""
    pytest.importorskip("mypy", reason="needs mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, str(tmp_path / "typed.py")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    embed, encode = (line for line in done.stdout.splitlines() if "Revealed type" in line)
    assert "def (texts: list[str], *, normalize: bool" in embed and embed.endswith('-> bytes"'), (
        done
    )
    assert "def (text: str) ->" in encode and 'float]"' in encode, done
    assert 'incompatible type "str"; expected "list[str]"' in done.stdout, done
    assert 'Unexpected keyword argument "normalise"' in done.stdout, done
    assert done.stdout.count("error:") == 2, done


def test_wrong_use() -> None:
    """Each mistake is told apart, when decorating where it can be."""

    def embed(batch_size: int, texts: list[str]) -> int:
        return batch_size

    with pytest.raises(TypeError, match="must take the batch size as its first argument"):
        find_batch_size(lambda: 1)()
    with pytest.raises(TypeError, match=r"does so: `embed\(texts=\['a'\]\)`"):
        find_batch_size(embed)(batch_size=3, texts=["a"])
    with pytest.raises(TypeError, match="reduce_batch_size_fn must be a function, not 64"):
        find_batch_size(embed, reduce_batch_size_fn=64)
    for wrong in ("5", 0, True):
        with pytest.raises(ValueError, match="restore_after must be a whole number of calls"):
            find_batch_size(embed, restore_after=wrong)
    with pytest.raises(TypeError, match="reduce_batch_size_fn returned None"):
        find_batch_size(lambda batch_size: out_of_memory(), reduce_batch_size_fn=lambda: None)()


def test_builtins_that_do_not_tell_what_they_take() -> None:
    """Functions made in C, torch's too, often have no signature."""
    assert find_batch_size(torch.zeros, starting_batch_size=3)().shape == (3,)
