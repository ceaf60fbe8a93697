"""The interface of loaded models, the encoder that runs sentence-transformers, and `encode`.

`encode` is the one way to run a model, on every device: in sorted batches of about equal length.
What differs between devices is data, see `Limits`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rag_demo.encoding.model_identity import check_hub
from rag_demo.errors import ModelError, RagDemoError, check_device, required
from rag_demo.vectors import Vectors, ahead
from torch_utils import ReleasedError, find_batch_size

Kind = Literal["query", "document"]
Prompts = Mapping[str, str]  # by kind
_CHARS_PER_TOKEN = 512  # at most, in any ordinary text
_PAYS_SOONER = 4
_BYTES_PER_TOKEN = 4  # about
_PART_CHARS, _LEAST_CHARS = 1 << 19, 128  # Up to 4,096 texts are prepared at once.
_MOST_TOKENS = 1 << 30  # A larger limit stands for none.


@dataclass(frozen=True)
class Limits:
    """What differs between kinds of devices.

    Attributes:
        tokens: Tokens of a batch, with padding.
        padding: How many of them may be padding; smaller batches cost more than some padding.
        ahead: Batches of a thread that may be under way; a query waits for them.
        pinned: Whether inputs and results pass through pinned memory, without a wait.
    """

    tokens: int
    padding: int
    ahead: int
    pinned: bool = False


# On a CPU, larger batches leave its caches. On a GPU, smaller ones take no less time.
LIMITS = {"cpu": Limits(1 << 10, 240, 1), "cuda": Limits(1 << 14, 1 << 13, 2, pinned=True)}
_OTHER_DEVICE = Limits(1 << 14, 1 << 13, 2)
_WITHOUT_ATTENTION = Limits(1 << 16, 1 << 16, 1)  # Padding costs nothing.


def limits_of(device: str) -> Limits:
    """Return the limits of a device's kind."""
    return LIMITS.get(device.partition(":")[0], _OTHER_DEVICE)


def readable(texts: Sequence[str], max_tokens: int | None) -> list[str]:
    """Cut off what no model of so many tokens reads, and replace lone surrogates.

    So long texts are tokenised fast, and tokenizers refuse no text.
    """
    most = None if max_tokens is None else _CHARS_PER_TOKEN * max_tokens
    return [text[:most].encode("utf-8", "replace").decode() for text in texts]


class Encoder(Protocol):
    """A loaded model.

    Attributes:
        dimension: Length of the vectors.
        limits: The limits of its batches.
        weights: By how many numbers a token is multiplied, about.
        is_for_dot_products: Whether it was trained for them, and its vectors had other lengths.
    """

    dimension: int
    limits: Limits
    weights: int
    is_for_dot_products: bool

    @property
    def prompts(self) -> Mapping[str, str | None]:
        """What is put before texts, by kind."""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens of a text the model reads; None if that is unknown."""

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int] | None:
        """Count the tokens of texts before they are cut off. None if that is unknown."""

    def prepare(self, texts: Sequence[str], kind: Kind) -> list[tuple[int, Any]]:
        """Return about how many tokens each text has, and its input. For any thread."""

    def launch(self, inputs: Sequence[Any], kind: Kind) -> Any:
        """Embed inputs, the longest first: a tensor of shape (n, d), each row of length 1.

        One thread at a time may call it. On a GPU it returns before the device has finished.
        """


def encode(
    encoder: Encoder,
    texts: Sequence[str],
    kind: Kind,
    done: Callable[[list[int], Vectors], object],
    turn: Callable[[], contextlib.AbstractContextManager[object]],
    batch_size: int | None = None,
) -> None:
    """Embed texts in batches of about equal length, the longest first.

    The next texts are prepared in a thread while the device computes. After a lack of memory, this
    and the following batches have half the tokens.

    Args:
        encoder: The model.
        texts: The texts.
        kind: "query" or "document".
        done: Called with the rows and the vectors of each batch, shape (n, d), float32.
        turn: Makes a context manager that is held while a batch is launched.
        batch_size: How many texts a batch may have; None for as many as the limits allow.
    """
    import torch

    from rag_demo.threads import threads, worth

    limits, under_way = encoder.limits, deque[tuple[list[int], Any, Any]]()
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))

    def prepare(rows: Sequence[int]) -> list[tuple[int, int, Any]]:
        inputs = encoder.prepare([texts[row] for row in rows], kind)
        found = ((length, row, each) for row, (length, each) in zip(rows, inputs, strict=True))
        return sorted(found, key=lambda item: -item[0])

    @find_batch_size(starting_batch_size=limits.tokens)
    def launch(tokens: int, waiting: list[tuple[int, int, Any]]) -> int:
        lengths, rows, inputs = zip(*waiting[: batch_size or tokens], strict=True)
        sizes = np.arange(1, len(lengths) + 1) * lengths[0]  # The first one is the longest.
        fits = (sizes <= tokens) & (sizes - np.cumsum(lengths) <= limits.padding)
        count = max(1, int(fits.sum()))
        # Two threads pay sooner than in a search, whose vectors must be read.
        work = _PAYS_SOONER * int(sizes[count - 1]) * encoder.weights
        many = worth(work, torch.get_num_threads())
        with turn(), threads(many):
            vectors, event = encoder.launch(inputs[:count], kind).float(), None
            if limits.pinned:
                device, vectors = vectors.device, vectors.to("cpu", non_blocking=True)
                event = torch.cuda.current_stream(device).record_event()
        under_way.append((list(rows[:count]), vectors, event))
        return count

    def finish() -> None:
        rows, vectors, event = under_way.popleft()
        if event is not None:
            event.synchronize()
        done(rows, vectors.cpu().numpy())

    parts = packed([_LEAST_CHARS + len(texts[row]) for row in order], _PART_CHARS)
    try:
        for waiting in ahead(prepare, (order[part] for part in parts)):
            while waiting:
                waiting = waiting[launch(waiting) :]
                if len(under_way) >= limits.ahead:
                    finish()
        while under_way:
            finish()
    except ReleasedError:
        with turn():  # It says that another thread has closed or unloaded the model.
            raise


def packed(sizes: Sequence[int], budget: int) -> list[slice]:
    """Return slices of items whose sizes are about ``budget`` together, or of a single item."""
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // budget)) + 1
    bounds = pairwise([0, *ends.tolist(), len(sizes)])
    return [slice(start, stop) for start, stop in bounds if stop]


@contextlib.contextmanager
def loading(what: str, name: str, device: str, hint: str) -> Iterator[None]:
    """Turn any error of a block that loads a model into a `ModelError` of one line.

    A model that is not a folder is looked for on the hub first.

    Args:
        what: What is loaded, for the message.
        name: A folder, or a name on the hub.
        device: torch's name of the device.
        hint: What to do if the files are the reason.
    """
    check_device(device)
    try:
        if not Path(name).exists():
            check_hub(name)
        yield
    except RagDemoError:
        raise
    except Exception as error:
        # The libraries raise many types of errors for a damaged model.
        reason = str(error).strip().partition("\n")[0] or repr(error)
        raise ModelError(f"{what} {name!r} cannot be loaded: {reason}; {hint}") from error


def sentence_transformers() -> Any:
    """Import sentence-transformers, without progress bars.

    Raises:
        ModelError: It is not installed.
    """
    with required("this model", ModelError, "rag"):
        import sentence_transformers
        from transformers.utils import logging
    logging.disable_progress_bar()  # It would be drawn on stderr.
    return sentence_transformers


class SentenceTransformersEncoder:
    """An `Encoder` for any model that sentence-transformers can run.

    Args:
        path: A folder, or a name on the hub.
        device: torch's name of the device.
        dtype: torch's dtype of the weights.
        prompts: Prompts by kind that replace the model's own.
        options: Other options of sentence-transformers.
    """

    def __init__(
        self, path: str, device: str, dtype: Any, prompts: Prompts, **options: Any
    ) -> None:
        import torch

        self.model = sentence_transformers().SentenceTransformer(
            path,
            device=device,
            local_files_only=Path(path).exists(),
            model_kwargs={"dtype": dtype},
            **options,
        )
        tokenizer = self.model.tokenizer
        if getattr(tokenizer, "pad_token", "") is None:  # Of GPT-2 and others.
            if tokenizer.eos_token is None:
                raise ValueError("its tokenizer has no padding token, and none that can be one")
            tokenizer.pad_token = tokenizer.eos_token  # What it is does not matter: it is masked.
        self.model.prompts.update(prompts)
        self.prompts: Mapping[str, str | None] = self.model.prompts
        self.is_for_dot_products = self.model.similarity_fn_name == "dot" and not any(
            type(module).__name__ == "Normalize" for module in self.model
        )
        self.dimension = int(self.model.get_embedding_dimension())
        limit = self.model.max_seq_length
        self.max_tokens = int(limit) if limit and limit < _MOST_TOKENS else None
        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        layers = (each for each in self.model.modules() if not isinstance(each, embeddings))
        self.weights = sum(p.numel() for each in layers for p in each.parameters(recurse=False))
        is_static = type(self.model[0]).__name__ == "StaticEmbedding"
        self.limits = _WITHOUT_ATTENTION if is_static else limits_of(device)

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int] | None:
        """Count the tokens of texts before they are cut off. None if the tokenizer is unusual.

        One thread at a time may call it, and not during `launch`.
        """
        prompt, tokenizer = self.model.prompts.get(kind) or "", self.model.tokenizer
        texts = readable([prompt + text for text in texts], self.max_tokens)
        if hasattr(tokenizer, "encode_batch"):  # of a model without attention
            return list(map(len, tokenizer.encode_batch(texts, add_special_tokens=False)))
        try:
            return list(map(len, tokenizer(texts, verbose=False)["input_ids"]))
        except (AttributeError, KeyError, TypeError):
            return None

    def prepare(self, texts: Sequence[str], kind: Kind) -> list[tuple[int, str]]:
        """Return estimates, because two threads must not use the tokenizer at the same time."""
        texts, most = readable(texts, self.max_tokens), self.max_tokens or _MOST_TOKENS
        sizes = (len(text.encode()) for text in texts)
        lengths = (min(2 + size // _BYTES_PER_TOKEN, most) for size in sizes)
        return list(zip(lengths, texts, strict=True))

    def launch(self, inputs: Sequence[str], kind: Kind) -> Any:
        """Embed texts."""
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        return encode(
            list(inputs),
            batch_size=len(inputs),
            normalize_embeddings=True,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
