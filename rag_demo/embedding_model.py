"""EmbeddingModel: turns texts into vectors, loads on first use, and releases its memory.

A pattern for models of your own: `load_model` loads the weights on first use, `_embed` checks that
the object is open. `unload_model` releases the weights in place, even if other variables refer to
them. `torch_utils.Resource` calls `_release` exactly once: at ``close()``, at the end of
``with``, at garbage collection, or at exit. ``examples/own_model.py`` does this in thirty lines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from rag_demo.encoding.embedder import OnProgress
from rag_demo.encoding.embedding_cache import EmbeddingCache, make_key
from rag_demo.encoding.encoder import (
    Encoder,
    Kind,
    SentenceTransformersEncoder,
    encode,
    loading,
    packed,
)
from rag_demo.encoding.model_identity import (
    DEFAULT_MODEL,
    MOVED,
    ModelIdentity,
    check_model_name,
    identify,
    packaged_model,
)
from rag_demo.errors import ModelError, check_positive, checked_texts
from rag_demo.vectors import Vectors, shortened
from torch_utils import CleanupReport, Resource, closes_on_error, get_optimal_device, release

__all__ = ["DEFAULT_MODEL", "EmbeddingModel"]

_COUNTED_CHARS = 1 << 17  # before another thread may take its turn

log = logging.getLogger("rag_demo")
log.addHandler(logging.NullHandler())


class EmbeddingModel(Resource):
    """A sentence-transformers model, loaded on first use.

    A BERT with mean or CLS pooling in a local folder runs without sentence-transformers; see
    `rag_demo.encoding.bert_encoder`. Every other model runs with sentence-transformers, and a
    DEBUG line of the log says why. Lone surrogates in texts are replaced by "?". Vectors depend on
    batch size, order and neighbours only within the rounding of float32.

    The model is closed at exit at the latest; see `torch_utils.Resource`. Threads take turns, a
    batch each. So a query waits only for the batches under way, and `close` for the current turn.

    Args:
        model_name_or_path: A folder, or a name on the hub. By default the weights of
            all-MiniLM-L6-v2 that the extra ``model`` installs, without a download.
        device: torch's name of the device; by default the best one available.
        batch_size: How many texts a forward pass may have; by default as many as the device's
            limit of tokens allows, see `batch_tokens`.
        dtype: The dtype of the weights: "float32" (the default), "bfloat16" or "float16".
        trust_remote_code: Whether to run code that comes with the model.
        cache: A file to store embeddings in, see `rag_demo.encoding.embedding_cache`. Embeddings
            are stored if the model's files are known. None stores nothing.
        prompts: What is put before texts of the kinds "query" and "document", instead of the
            model's own prompts.
        truncate_dim: Keep so many of the first numbers of each vector, for models that are trained
            for it (Matryoshka).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value.
    """

    @closes_on_error
    def __init__(
        self,
        model_name_or_path: str | Path | None = None,
        *,
        device: str | None = None,
        batch_size: int | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        cache: str | Path | None = None,
        prompts: Mapping[str, str] | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        check_model_name(DEFAULT_MODEL if model_name_or_path is None else model_name_or_path)
        check_positive("batch_size", batch_size)
        check_positive("truncate_dim", truncate_dim)
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f'dtype must be "float32", "bfloat16" or "float16", got {dtype!r}')
        are_texts = all(isinstance(prompt, str) for prompt in (prompts or {}).values())
        if not are_texts or not {"query", "document"}.issuperset(prompts or {}):
            raise ValueError(f'prompts must map "query" or "document" to str, got {prompts!r}')
        self.name = str(model_name_or_path or DEFAULT_MODEL)
        self._is_default = model_name_or_path in (None, DEFAULT_MODEL)
        self.device = device
        self.batch_size = batch_size
        self._dtype = dtype or "float32"
        self._trust_remote_code = trust_remote_code
        self.prompts = dict(prompts or {})
        self.truncate_dim = truncate_dim
        self._cache = None if cache is None else EmbeddingCache(Path(cache))
        self._identity: ModelIdentity | None = None
        self._encoder: Encoder | None = None
        self._was_unloaded = False
        # Reentrant: a signal handler may close the model in the thread that is encoding.
        self._in_use = threading.RLock()
        self._next = threading.Lock()  # A thread that waits for its turn holds it.

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._encoder is not None

    @property
    def identity(self) -> ModelIdentity:
        """The identity of the model. A model of the hub that is missing is downloaded.

        Raises:
            ModelError: The files are missing or cannot be read.
        """
        with self._in_use if self._identity is None else contextlib.nullcontext():
            identity = self._identity = self._identity or self._find()[1]
        if identity.fingerprint is None and not self.is_loaded:
            self._loaded()
        return self._identity or identity

    @property
    def dimension(self) -> int:
        """Length of the vectors. Loads the model."""
        full = self._loaded().dimension
        return self.truncate_dim or full

    @property
    def has_prompts(self) -> bool:
        """Whether something is put before texts: prompts of the model or its replacements."""
        return any(self._loaded().prompts.values())

    @property
    def max_tokens(self) -> int | None:
        """How many tokens of a text the model reads; None if unknown. Loads the model."""
        return self._loaded().max_tokens

    @property
    def batch_tokens(self) -> int:
        """How many tokens keep the device busy; pass texts of at least so many. Loads the model."""
        limits = self._loaded().limits
        return limits.tokens * limits.ahead

    def count_tokens(self, texts: Sequence[str], kind: Kind = "document") -> list[int] | None:
        """Count the tokens of each text, with its prompt, before it is cut off.

        Args:
            texts: The texts.
            kind: "query" or "document"; each has a prompt.

        Returns:
            The counts, or None if they are unknown. For a text far beyond `max_tokens`, a lower
            bound that is above `max_tokens`.
        """
        encoder, counts = self._loaded(), list[int]()
        for part in packed(list(map(len, texts)), _COUNTED_CHARS):
            with self._turn(encoder):
                found = encoder.count_tokens(texts[part], kind)
            if found is None:
                return None
            counts += found
        return counts

    def load_model(self) -> bool:
        """Load the weights now rather than on first use.

        Returns:
            True if this call loaded them, False if they were in memory.

        Raises:
            ModelError: The model's files are missing, damaged, or have changed.
            ResourceClosedError: This object is closed.
        """
        with self._in_use:
            self.ensure_open()
            if self._encoder is not None:
                return False
            path, found = self._find()
            expected = self._identity or found
            commit = (expected.fingerprint or "").partition("@")[2]
            self.device = self.device or get_optimal_device()
            encoder = self._new_encoder(path, self.device, commit or None)
            try:
                if (self.truncate_dim or 0) > encoder.dimension:
                    raise ModelError(
                        f"truncate_dim is {self.truncate_dim}, but the vectors of {self.name} have "
                        f"{encoder.dimension} numbers"
                    )
                found = self._find()[1]
                if expected.fingerprint and not found.is_same(expected):
                    raise ModelError(
                        f"the files of {self.name} have changed since this object first read them; "
                        "create another EmbeddingModel, and embed the texts again"
                    )
            except BaseException:  # After an interrupt too, nothing else would release it.
                _release_encoder(encoder)
                raise
            self._identity, self._encoder = found, encoder
            self._was_unloaded = False
            log.debug("loaded %s on %s", self.name, self.device)
            if encoder.is_for_dot_products:
                log.warning(
                    "%s was trained for dot products, but its vectors get the length 1 here; "
                    "compare its answers with those of another model",
                    self.name,
                )
            return True

    def _new_encoder(self, path: str, device: str, commit: str | None) -> Encoder:
        """Load a BERT with layers of our own if that is possible, else sentence-transformers.

        What is missing of a model of the hub is downloaded from the commit that is here already.
        """
        is_folder = Path(path).is_dir()
        hint = "name another folder" if is_folder else f"there is no such folder; {MOVED}"
        with loading("the model", path, device, hint):
            import torch

            from rag_demo.encoding.bert_encoder import BertEncoder

            options = device, getattr(torch, self._dtype), self.prompts
            if is_folder and not self._trust_remote_code:
                try:
                    return BertEncoder(Path(path), *options)
                except (ValueError, OSError, KeyError) as why:
                    log.debug("%s is run by sentence-transformers: %s", path, why)
            return SentenceTransformersEncoder(
                path,
                *options,
                revision=None if is_folder else commit,
                trust_remote_code=self._trust_remote_code,
            )

    def unload_model(self) -> CleanupReport:
        """Release the weights. `load_model` loads them again.

        Returns:
            A report of what was freed and what is still held; empty if nothing was loaded.
        """
        with self._in_use:
            encoder, self._encoder = self._encoder, None
            self._was_unloaded = self._was_unloaded or encoder is not None
            return _release_encoder(encoder)

    def _release(self) -> None:
        # Runs once, while torch is intact. Waits for a thread that is encoding.
        if hasattr(self, "_in_use"):  # `__init__` may have raised.
            self.unload_model()
            if self._cache is not None:
                self._cache.close()

    def embed_query(self, text: str) -> Vectors:
        """Embed one query.

        Args:
            text: The query.

        Returns:
            Shape (d,), float32, of length 1.
        """
        vector: Vectors = self.embed_queries([text])[0]
        return vector

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Embed queries, with the model's query prompt if it has one.

        Args:
            texts: The queries.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        return self._embed(texts, "query", None)

    def embed_documents(self, texts: Sequence[str], *, on_progress: OnProgress = None) -> Vectors:
        """Embed documents, with the model's document prompt if it has one.

        Args:
            texts: The documents. The model cuts off long ones, see `max_tokens`.
            on_progress: Called with the number of texts embedded since the last call.

        Returns:
            Shape (n, d), float32, each row of length 1.

        Raises:
            TypeError: A text is not str.
        """
        return self._embed(texts, "document", on_progress)

    def _embed(self, texts: Sequence[str], kind: Kind, on_progress: OnProgress) -> Vectors:
        texts = checked_texts(texts, "texts")
        encoder, dimension = self._loaded(), self.dimension
        vectors = np.empty((len(texts), dimension), np.float32)
        keys = self._keys(texts, kind)
        known = self._cache.get(keys, dimension) if self._cache and keys else {}
        missing = [row for row in range(len(texts)) if not keys or keys[row] not in known]
        for row in {*range(len(texts))}.difference(missing):
            vectors[row] = known[keys[row]]
        if on_progress is not None and len(missing) < len(texts):
            on_progress(len(texts) - len(missing))

        def done(numbers: list[int], computed: Vectors) -> None:
            rows = [missing[number] for number in numbers]
            vectors[rows] = shortened(computed, dimension)
            if self._cache and keys:
                self._cache.put([keys[row] for row in rows], vectors[rows])
            if on_progress is not None:
                on_progress(len(rows))

        new, turn = [texts[row] for row in missing], partial(self._turn, encoder)
        encode(encoder, new, kind, done, turn, self.batch_size)
        log.debug("embedded %d texts", len(texts))
        return vectors

    @contextlib.contextmanager
    def _turn(self, encoder: Encoder) -> Iterator[None]:
        """Use the model. Threads take turns: one that has had its turn goes behind the others."""
        try:
            with self._next:
                self._in_use.acquire()
            self.ensure_open()  # Another thread may have closed or unloaded it.
            if self._encoder is not encoder:
                raise ModelError(f"{self.name} was unloaded while it was embedding")
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # An interrupt came before it was acquired.
                self._in_use.release()

    def _keys(self, texts: Sequence[str], kind: Kind) -> list[bytes]:
        """Return the key of each text in the cache; nothing without a cache."""
        fingerprint = self._identity and self._identity.fingerprint
        if self._cache is None or not fingerprint:
            return []
        made_by = (fingerprint, self._dtype, self.device, self.truncate_dim)
        return [make_key(*made_by, kind, self.prompts.get(kind), text) for text in texts]

    def _find(self) -> tuple[str, ModelIdentity]:
        """Return the folder or the name on the hub, and the identity."""
        try:
            path = str(packaged_model()) if self._is_default else self.name
            return path, identify(
                path,
                self.name,
                dtype=self._dtype,
                document_prompt=self.prompts.get("document"),
                query_prompt=self.prompts.get("query"),
                truncate_dim=self.truncate_dim,
                trust_remote_code=self._trust_remote_code,
            )
        except OSError as error:
            raise ModelError(f"the model {self.name!r} cannot be read: {error}") from error

    def _loaded(self) -> Encoder:
        """Return the encoder. A thread that uses the model does not delay this."""
        self.ensure_open()
        if encoder := self._encoder:
            return encoder
        with self._in_use:
            if self._was_unloaded:
                raise ModelError(f"{self.name} was unloaded; call load_model() to use it again")
            self.load_model()
            assert self._encoder is not None
            return self._encoder


def _release_encoder(encoder: Encoder | None) -> CleanupReport:
    """Release an encoder, and its SentenceTransformer by itself.

    That one and its model card refer to each other. Passed by itself it is emptied, which breaks
    the cycle; otherwise the release would need a full garbage collection.
    """
    return release(encoder, getattr(encoder, "model", None))
