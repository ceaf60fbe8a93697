"""Several processes that embed: started on first use, closed with the model.

Each is a Python of its own that talks over its stdin and stdout, in JSON and raw float32: no
pickle, no semaphores, no forked state. One that loses its parent reads the end of its stdin and
leaves.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from rag_demo.encoding.encoder import Kind
from rag_demo.encoding.load_encoder import load_encoder
from rag_demo.errors import ModelError
from rag_demo.vectors import Vectors

__all__ = ["WorkerEncoder"]

_LENGTH = struct.Struct("<Q")
_PATIENCE_S = 10.0  # for a worker that was asked to leave


class WorkerEncoder:
    """An `Encoder` that deals its texts out to processes; and `close`.

    Args:
        count: How many processes.
        options: The arguments of `load_encoder`.

    Raises:
        ModelError: A worker cannot load the model.
    """

    def __init__(self, count: int, options: dict[str, Any]) -> None:
        threads = max(1, (os.cpu_count() or 1) // count)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        # Not "-m": what the program has put into its own folder must not be imported instead.
        start = "from rag_demo.encoding.worker_encoder import serve; serve()"
        command = [sys.executable, "-c", start]
        self.truncated = 0
        self._workers = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            for _ in range(count)
        ]
        try:
            for worker in self._workers:
                _send(worker.stdin, options)
            answers = [self._answer(worker) for worker in self._workers]
            self.dimension = int(answers[0]["dimension"])
        except BaseException:  # Whatever it is, no process may stay behind.
            self.close()
            raise

    def prepare(self, texts: Sequence[str], kind: Kind) -> tuple[Kind, list[str]]:
        """Put down what `encode` takes: the workers make tokens of it."""
        return kind, list(texts)

    def encode(
        self, prepared: tuple[Kind, list[str]], batch_size: int, *, many: bool = False
    ) -> Vectors:
        """Embed texts, dealt out in turns: shape (n, d), float32, each row of length 1.

        Raises:
            ModelError: A worker has ended.
            RuntimeError: A worker ran out of memory.
        """
        kind, texts = prepared
        count = len(self._workers)
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for number, worker in enumerate(self._workers):
            job = {"texts": texts[number::count], "kind": kind}
            self._tell(worker, {**job, "batch_size": batch_size, "many": many})
        errors = []
        for number, worker in enumerate(self._workers):
            answer = self._answer(worker)
            if "error" in answer:
                errors.append(answer["error"])
                continue
            self.truncated += answer["truncated"]
            data = _read(worker.stdout)
            if data is None:
                raise self._ended(worker)
            vectors[number::count] = np.frombuffer(data, np.float32).reshape(-1, self.dimension)
        if errors:
            raise RuntimeError(errors[0])
        return vectors

    def close(self) -> None:
        """Ask the processes to leave, and end those that do not."""
        workers, self._workers = self._workers, []
        for worker in workers:
            try:
                if worker.stdin is not None:
                    worker.stdin.close()
            except OSError:
                pass  # It has ended already, with something unread.
        for worker in workers:
            try:
                worker.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()

    def _tell(self, worker: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
        try:
            _send(worker.stdin, message)
        except OSError:
            raise self._ended(worker) from None

    def _answer(self, worker: subprocess.Popen[bytes]) -> dict[str, Any]:
        data = _read(worker.stdout)
        if data is None:
            raise self._ended(worker)
        answer: dict[str, Any] = json.loads(data)
        if "fatal" in answer:
            raise ModelError(answer["fatal"])
        return answer

    def _ended(self, worker: subprocess.Popen[bytes]) -> ModelError:
        """Make the error for a worker that is gone, and end the others: answers are lost."""
        self.close()
        code = worker.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ModelError(
            f"an embedding worker ended in the middle of its work ({how}); if the system ran out "
            "of memory, use fewer workers"
        )


def _send(stream: IO[bytes] | None, message: dict[str, Any]) -> None:
    assert stream is not None
    data = json.dumps(message, ensure_ascii=True).encode("ascii")
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes] | None) -> bytes | None:
    """Read one message; None at the end of the stream, also in the middle of a message."""
    assert stream is not None
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def serve() -> None:
    """Be a worker, until stdin ends."""
    import signal

    from torch_utils import SafePyTorchCleanup, fast_exit, is_out_of_memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes this.
    fast_exit()
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not come between the messages.
    options = json.loads(_read(stdin) or b"{}")
    with SafePyTorchCleanup() as scope:
        try:
            encoder = scope.manage(load_encoder(**options))
            _send(stdout, {"dimension": encoder.dimension})
        except ModelError as error:
            _send(stdout, {"fatal": str(error)})
            return
        while (message := _read(stdin)) is not None:
            job = json.loads(message)
            truncated = encoder.truncated
            try:
                prepared = encoder.prepare(job["texts"], job["kind"])
                vectors = encoder.encode(prepared, job["batch_size"], many=job["many"])
            except Exception as error:
                # The parent halves the batch if memory ran out, and raises anything else.
                what = "out of memory: " if is_out_of_memory(error) else ""
                _send(stdout, {"error": f"{what}{error}"})
                continue
            _send(stdout, {"truncated": encoder.truncated - truncated})
            stdout.write(_LENGTH.pack(vectors.nbytes) + np.ascontiguousarray(vectors).tobytes())
            stdout.flush()
