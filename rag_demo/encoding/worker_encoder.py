"""Worker processes that embed. They are started on first use and end with the model.

Each is a `torch_utils.hosting.process.ModelProcess`, called by a thread. If one ends, all are
ended, and the next call starts new ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rag_demo.encoding.encoder import Encoder, Kind
from rag_demo.encoding.load_encoder import load_encoder
from rag_demo.errors import ModelError
from rag_demo.vectors import Vectors
from torch_utils import ModelProcessError
from torch_utils.hosting.process import ModelProcess, pickled_load

T = TypeVar("T")


class Worker:
    """The model of a worker process.

    Args:
        **options: The arguments of `load_encoder`.
    """

    def __init__(self, **options: Any) -> None:
        self._encoder: Encoder[Any] = load_encoder(**options)
        self.dimension = self._encoder.dimension

    def embed(self, texts: Sequence[str], kind: Kind, batch_size: int) -> tuple[Vectors, int]:
        """Embed texts. Return their vectors, and how many texts were cut off."""
        before = self._encoder.truncated
        prepared = self._encoder.prepare(texts, kind)
        vectors = self._encoder.encode(prepared, batch_size)
        return vectors, self._encoder.truncated - before


class WorkerEncoder:
    """An `Encoder` that distributes texts to worker processes.

    Args:
        count: How many processes to start.
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
        """Return the texts for `encode`; the workers tokenise them."""
        return kind, list(texts)

    def encode(self, prepared: tuple[Kind, list[str]], batch_size: int) -> Vectors:
        """Embed texts: shape (n, d), float32, each row of length 1.

        Raises:
            ModelError: A worker has ended.
            Exception: The error of a worker's encoder, usually out of memory.
        """
        kind, texts = prepared
        vectors = np.empty((len(texts), self.dimension), np.float32)
        try:
            workers = self._started()
            shares = [texts[number :: len(workers)] for number in range(len(workers))]

            def embed(worker: ModelProcess, share: list[str]) -> tuple[Vectors, int]:
                answer: tuple[Vectors, int] = worker.call("embed", share, kind, batch_size)
                return answer

            answers = _in_threads(
                [partial(embed, *one) for one in zip(workers, shares, strict=True)]
            )
        except ModelProcessError as error:
            self._end()
            raise ModelError(
                f"an embedding worker ended while it was working: {error}; "
                "if the system ran out of memory, use fewer workers"
            ) from error
        except (KeyboardInterrupt, SystemExit):  # The workers are still computing.
            self._end()
            raise
        for number, (share, truncated) in enumerate(answers):
            vectors[number :: len(workers)] = share
            self.truncated += truncated
        return vectors

    def _started(self) -> list[ModelProcess]:
        """Return the workers; start them if one has ended or they belong to a forked parent."""
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
            _in_threads([worker.wait_until_loaded for worker in self._workers])
        except BaseException as error:  # An interrupt must not leave processes either.
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
        """End the processes at once; they have nothing to save."""
        self._is_closed = True
        self._end()


def _in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls at the same time, and return their results.

    Raises:
        ModelProcessError: A process has ended. This is raised at once.
        Exception: The error of another call, after all calls have ended.
    """
    futures: list[Future[T]] = [Future() for _ in calls]

    def make(call: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # The caller raises it.
            future.set_exception(error)

    for one in zip(calls, futures, strict=True):
        # Not a pool: at exit, its threads would wait for a call that hangs.
        threading.Thread(target=make, args=one, name="rag_demo-embed", daemon=True).start()
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if isinstance(error, ModelProcessError):
                raise error
    return [future.result() for future in futures]
