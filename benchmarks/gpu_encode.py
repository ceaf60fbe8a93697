"""Compare encoding with ``SentenceTransformer.encode``, with random weights.

The architecture is MiniLM's. The weights show speed and agreement, not quality.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_setting import Setting
from rag_demo import EmbeddingModel
from torch_utils import measuring, release

MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


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


def encode(setting: Setting) -> list[dict[str, Any]]:
    """Measure both libraries with each dtype and two batch sizes, by turns."""
    changes = {"num_hidden_layers": 1, "vocab_size": 2000} if setting.rehearse else {}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, words = write_model(Path(name), **changes)
        texts = texts_of(words, 32 if setting.rehearse else 8192)
        expected = None
        for dtype in ("float32", "float16", "bfloat16"):
            for batch in (32, 256):
                if setting.seconds_left() < 10:
                    results.append({"dtype": dtype, "batch": batch, "left_out": "no time was left"})
                    continue
                row, theirs = _row(setting, folder, texts, dtype, batch)
                expected = theirs if expected is None else expected
                for who, vectors in row.pop("vectors").items():
                    row[f"{who}_cosine_with_float32"] = _cosine(vectors, expected)
                results.append(row)
                print({name: value for name, value in row.items() if not name.endswith("_s")})
    return results


def _row(
    setting: Setting, folder: Path, texts: list[str], dtype: str, batch: int
) -> tuple[dict[str, Any], Any]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folder), device=setting.device)
    theirs.to(getattr(torch, dtype))
    ours = EmbeddingModel(folder, device=setting.device, dtype=dtype, batch_size=batch)
    ways = {
        "ours": ours.embed_documents,
        "theirs": lambda some: theirs.encode(
            some, batch_size=batch, normalize_embeddings=True, show_progress_bar=False
        ),
    }
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    vectors: dict[str, Any] = {}
    for way in ways.values():
        way(texts[: 4 * batch])  # Loads the model and its kernels.
    for _ in range(1 if setting.rehearse else 3):
        for who, way in ways.items():
            with measuring(setting.device) as taken:
                vectors[who] = np.asarray(way(texts), np.float32)
            seconds[who] += taken.host_s
    ours.close()
    release(theirs)
    medians = {who: statistics.median(times) for who, times in seconds.items()}
    row = {
        "dtype": dtype,
        "batch": batch,
        "texts": len(texts),
        "ours_s": seconds["ours"],
        "theirs_s": seconds["theirs"],
        "ours_texts_per_s": len(texts) / medians["ours"],
        "theirs_texts_per_s": len(texts) / medians["theirs"],
        "times_as_fast": medians["theirs"] / medians["ours"],
        "vectors": vectors,
    }
    return row, vectors["theirs"]


def _cosine(vectors: Any, expected: Any) -> float:
    return float((vectors * expected).sum(axis=1).min())
