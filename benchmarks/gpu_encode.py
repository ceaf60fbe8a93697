"""Compare encoding with ``SentenceTransformer.encode`` at several batch sizes.

The architecture is MiniLM's, with random weights. They show speed and agreement, not quality.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_setting import Setting
from rag_demo import EmbeddingModel
from rag_demo.encoding.encoder import limits_of
from torch_utils import release

MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
BATCHES = (32, 256, 1024)  # of sentence-transformers; its best one counts


def write_model(folder: Path, **changes: int) -> tuple[Path, list[str]]:
    """Write a model with random weights; return its folder and its words."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizer

    try:
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    except ImportError:
        from sentence_transformers.models import Pooling, Transformer
    config = {**MINILM, **changes}
    rng = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < config["vocab_size"] - 5:
        words["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))] = None
    source = folder / "transformer"
    source.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    BertModel(BertConfig(**config)).save_pretrained(source)
    BertTokenizer(str(source / "vocab.txt")).save_pretrained(source)
    transformer = Transformer(str(source), max_seq_length=256)
    pooling = Pooling(config["hidden_size"])
    SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder / "model"))
    return folder / "model", list(words)


def texts_of(words: list[str], count: int) -> list[str]:
    """Return texts of 5 to 200 words, mostly short, as in a corpus."""
    rng = random.Random(1)
    lengths = (min(200, 5 + int(rng.expovariate(1 / 40))) for _ in range(count))
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


def encode(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure both libraries with each dtype, the peer with each batch size."""
    changes = {"num_hidden_layers": 1, "vocab_size": 2000} if setting.rehearse else {}
    with tempfile.TemporaryDirectory() as name:
        folder, words = write_model(Path(name), **changes)
        texts = texts_of(words, 32 if setting.rehearse else 8192)
        expected = None
        for dtype in ("float16", "float32") if not setting.rehearse else ("bfloat16", "float32"):
            for way, work, close in _ways(setting, folder, dtype):
                row = {"dtype": dtype, **way, "texts": len(texts)}
                if setting.seconds_left() < 6:
                    yield row | {"left_out": "no time"}
                else:
                    work(texts[: len(texts) // 8])  # It loads the model and its kernels.
                    vectors: list[Any] = []
                    taken = setting.timed(lambda: vectors.append(work(texts)), most=3, most_s=3)  # noqa: B023
                    row["texts_per_s"] = len(texts) / taken.median_s
                    one = setting.timed(lambda: work(texts[:1]), most_s=0.3)  # noqa: B023
                    row["one_text_ms"] = 1e3 * one.median_s
                    found = np.asarray(vectors[-1], np.float32)
                    expected = found if expected is None else expected
                    row["least_cosine"] = float((found * expected).sum(axis=1).min())
                    yield row
                close()


def _ways(
    setting: Setting, folder: Path, dtype: str
) -> Iterator[tuple[dict[str, Any], Callable[[list[str]], Any], Callable[[], Any]]]:
    """Yield ways to encode: a name with a batch size, a function, and one that frees the model."""
    from sentence_transformers import SentenceTransformer

    ours = EmbeddingModel(folder, device=setting.device, dtype=dtype)
    yield (
        {"way": "rag_demo", "tokens": limits_of(setting.device).tokens},
        ours.embed_documents,
        ours.close,
    )
    theirs = SentenceTransformer(str(folder), device=setting.device)
    theirs.to(getattr(torch, dtype))
    for batch in BATCHES:
        yield (
            {"way": "sentence-transformers", "batch": batch},
            lambda texts, batch=batch: theirs.encode(  # type: ignore[misc]  # a default
                texts, batch_size=batch, normalize_embeddings=True, show_progress_bar=False
            ),
            (lambda: release(theirs)) if batch == BATCHES[-1] else lambda: None,
        )
