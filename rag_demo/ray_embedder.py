"""RayEmbedder: actors of Ray embed, and the calling program alone writes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import ActorPool

from rag_demo.embedding_model import EmbeddingModel
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import ModelError
from rag_demo.vectors import Vectors
from torch_utils import Resource, __version__, closes_on_error

_SLICE = 32  # texts of a call: a second or two of work, so that an actor can be closed soon
_PATIENCE_S = 60.0  # without an actor or a result
_CLOSE_S = 20.0

log = logging.getLogger("rag_demo")


class EmbeddingActor:
    """What an actor runs: a plain class that holds the model, which is a resource."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._model = EmbeddingModel(**options)

    def load(self) -> tuple[str, ModelIdentity, int]:
        """Load the model; return what must be the same on all machines, and the dimension."""
        return __version__, self._model.identity, self._model.dimension

    def embed(self, texts: list[str]) -> Vectors:
        """Embed documents."""
        return self._model.embed_documents(texts)

    def close(self) -> bool:
        """Release the model."""
        return self._model.close()


class RayEmbedder(Resource):
    """An embedding model for documents in actors of Ray, for any number of threads.

    Ray and the actors start at the first text, in the main thread. `close` releases the model in
    each actor, ends the actors, and ends a Ray that was started here. Texts of a lost actor go to
    the others.

    Args:
        address: The cluster; None starts a Ray on this machine.
        actors: How many; by default one for each GPU, or for each CPU if there are no GPUs.
        **options: Options of `EmbeddingModel`.
    """

    @closes_on_error
    def __init__(
        self, *, address: str | None = None, actors: int | None = None, **options: Any
    ) -> None:
        self._address, self._count, self._options = address, actors, options
        self._model = EmbeddingModel(**options)  # It tells the identity, and is never loaded.
        self._actors: list[Any] = []
        self._folder = ""
        self.dimension = 0

    @property
    def identity(self) -> ModelIdentity:
        """The identity of the model on this machine."""
        return self._model.identity

    def _start(self) -> None:
        self.ensure_open()
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # It warns otherwise.
        own: dict[str, Any] = {"address": self._address}
        if self._address is None:
            self._folder = tempfile.mkdtemp(prefix="rag-demo-ray-")
            own = {"address": "local", "_temp_dir": self._folder, "include_dashboard": False}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if self._address and re.fullmatch(r"[^/]+:\d+", self._address):
                host, _, port = self._address.rpartition(":")  # Ray would try for minutes.
                socket.create_connection((host, int(port)), _CLOSE_S).close()
            ray.init(**own, log_to_driver=False, logging_level=logging.CRITICAL)
            signal.signal(signal.SIGTERM, handler)  # Ray's own handler aborts.
            there = ray.cluster_resources()
            kind = "GPU" if there.get("GPU") else "CPU"
            count = self._count or int(there.get(kind, 0))
            if not 0 < count <= there.get(kind, 0):
                raise ModelError(
                    f"the cluster has {there.get(kind, 0):g} {kind}s, but each of {count} actors "
                    "needs one; pass a smaller --actors, or add machines"
                )
            remote = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"))(EmbeddingActor)
            self._actors = [remote.remote(self._options) for _ in range(count)]
            calls = [each.load.remote() for each in self._actors]
            for version, identity, dimension in ray.get(calls, timeout=_PATIENCE_S):
                if version != __version__ or not self.identity.is_same(identity):
                    raise ModelError(
                        f"a machine has torch-cleanup {version} and the model {identity}, but this "
                        f"one has {__version__} and {self.identity}; install the same on both"
                    )
                self.dimension = dimension
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise _error("Ray cannot be used", error) from None

    def embed_query(self, text: str) -> Vectors:
        """Refuse a query; a model in this process answers sooner."""
        raise ModelError("RayEmbedder embeds documents only; use an EmbeddingModel for queries")

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Embed documents: shape (n, d).

        Raises:
            ModelError: There is no cluster, or it lacks CPUs or the model, or all actors are lost.
        """
        if not self.dimension:
            self._start()
        size = max(1, min(_SLICE, len(texts) // max(1, 2 * len(self._actors))))
        parts = [list(texts[n : n + size]) for n in range(0, len(texts), size)]
        while self._actors:
            pool, vectors = ActorPool(self._actors), [np.empty((0, self.dimension), np.float32)]
            for part in parts:
                pool.submit(lambda actor, some: actor.embed.remote(some), part)
            try:
                while pool.has_next():
                    vectors.append(pool.get_next(timeout=_PATIENCE_S))
                return np.concatenate(vectors)
            except RayActorError as error:  # The machine or the process is gone; others do it.
                lost = error.actor_id
                self._actors = [each for each in self._actors if each._actor_id.hex() != lost]
                log.warning("an actor is lost; %d are left", len(self._actors))
            except (RayError, TimeoutError) as error:
                what = f"an actor failed, or made no progress for {_PATIENCE_S:g} s"
                raise _error(what, error) from None
        raise ModelError("all actors are lost; run the same command again to continue")

    def _release(self) -> None:
        if not hasattr(self, "dimension"):  # `__init__` has raised.
            return
        self._model.close()
        actors, self._actors = self._actors, []
        if ray.is_initialized():
            ray.wait([each.close.remote() for each in actors] or [ray.put(0)],
                     num_returns=max(1, len(actors)), timeout=_CLOSE_S)  # fmt: skip
            for each in actors:
                ray.kill(each)
            ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _error(what: str, error: Exception) -> ModelError:
    """Make an error of the last line of Ray's traceback."""
    lines = [line for line in str(error).splitlines() if line[:1].strip()]
    return ModelError(f"{what}: {lines[-1] if lines else type(error).__name__}")
