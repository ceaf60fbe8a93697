"""Several processes that embed: started on first use, closed with the model.

Each is a `torch_utils.hosting.process.ModelProcess`: messages are numbered and checked, and what
cannot be trusted any more is ended. One that ends takes the others along, for their answers would
be of another call; the next call starts new ones.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from rag_demo.encoding.encoder import Encoder, Kind
from rag_demo.encoding.load_encoder import load_encoder
from rag_demo.errors import ModelError
from rag_demo.vectors import Vectors
from torch_utils import ModelProcessError
from torch_utils.hosting.process import ModelProcess, pickled_load

__all__ = ["Worker", "WorkerEncoder"]


class Worker:
    """What each process has: an encoder, and how it is asked.

    Args:
        **options: The arguments of `load_encoder`.
    """

    def __init__(self, **options: Any) -> None:
        self._encoder: Encoder[Any] = load_encoder(**options)
        self.dimension = self._encoder.dimension

    def embed(self, texts: Sequence[str], kind: Kind, batch_size: int) -> tuple[Vectors, int]:
        """Return the texts' vectors, and how many texts were cut off."""
        before = self._encoder.truncated
        prepared = self._encoder.prepare(texts, kind)
        vectors = self._encoder.encode(prepared, batch_size)
        return vectors, self._encoder.truncated - before


class WorkerEncoder:
    """An `Encoder` that deals its texts out to processes; and `close`.

    Args:
        count: How many processes.
        options: The arguments of `Worker`.

    Raises:
        ModelError: A worker cannot load the model.
    """

    def __init__(self, count: int, options: dict[str, Any]) -> None:
        self._count = count
        self._load = pickled_load(partial(Worker, **options))
        self._is_closed = False
        self.truncated = 0
        self._workers: list[ModelProcess] = []
        self.dimension = int(self._started()[0].get("dimension")[1])

    def prepare(self, texts: Sequence[str], kind: Kind) -> tuple[Kind, list[str]]:
        """Put down what `encode` takes: the workers make tokens of it."""
        return kind, list(texts)

    def encode(self, prepared: tuple[Kind, list[str]], batch_size: int) -> Vectors:
        """Embed texts, dealt out in turns: shape (n, d), float32, each row of length 1.

        Raises:
            ModelError: A worker has ended.
            Exception: What a worker's encoder raised; memory ran out, mostly.
        """
        kind, texts = prepared
        vectors = np.empty((len(texts), self.dimension), np.float32)
        errors: list[Exception] = []
        try:
            workers = self._started()
            shares = [slice(number, None, len(workers)) for number in range(len(workers))]
            for worker, share in zip(workers, shares, strict=True):
                worker.begin("embed", texts[share], kind, batch_size)
            share_of = dict(zip(workers, shares, strict=True))
            for worker in _as_ready(workers):
                share = share_of[worker]
                try:
                    vectors[share] = self._checked(worker.finish(), len(texts[share]))
                except Exception as error:
                    # Whatever its encoder raised: the others' answers are taken first.
                    if not worker.is_alive():
                        raise
                    errors.append(error)
        except ModelProcessError as error:
            self._end()
            raise ModelError(
                f"an embedding worker ended in the middle of its work: {error}; if the system ran "
                "out of memory, use fewer workers"
            ) from error
        except BaseException:  # An interrupt: what they answer now is to nobody's question.
            self._end()
            raise
        if errors:
            raise errors[0]
        return vectors

    def _checked(self, answer: tuple[Vectors, int], count: int) -> Vectors:
        vectors, truncated = answer
        if vectors.shape != (count, self.dimension) or vectors.dtype != np.float32:
            raise ModelError(
                f"an embedding worker answered with {vectors.dtype}{list(vectors.shape)} "
                f"to {count} texts of {self.dimension} dimensions"
            )
        self.truncated += truncated
        return vectors

    def _started(self) -> list[ModelProcess]:
        """Return the workers; new ones where there are none, or only a forked parent's."""
        if self._workers and all(worker.is_alive() for worker in self._workers):
            return self._workers
        self._end()
        if self._is_closed:
            raise ModelError("the embedding workers are closed")
        threads = max(1, (os.cpu_count() or 1) // self._count)
        environment = {"OMP_NUM_THREADS": str(threads)}
        try:
            for number in range(1, self._count + 1):
                name = f"embedding worker {number}"
                self._workers.append(ModelProcess(self._load, name=name, environment=environment))
            for worker in _as_ready(self._workers):
                worker.wait_until_loaded()
        except BaseException as error:  # Whatever it is, no process may stay behind.
            self._end()
            if isinstance(error, ModelProcessError):
                raise ModelError(f"an embedding worker cannot start: {error}") from error
            raise
        return self._workers

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def close(self) -> None:
        """End the processes. They hold nothing that would have to be saved."""
        self._is_closed = True
        self._end()


def _as_ready(workers: Sequence[ModelProcess]) -> Iterator[ModelProcess]:
    """Yield each when its answer has come, or its end, whoever is asked first."""
    # Not epoll, which forgets without a word what a signal handler has closed.
    with selectors.PollSelector() as waiting:
        for worker in workers:
            waiting.register(worker, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                waiting.unregister(key.fd)
                yield cast(ModelProcess, key.fileobj)
