"""An embedder around a transformers pipeline, behind a cache: cached_pipeline.py HOW MODEL."""

import sqlite3
import sys
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, pipeline
from transformers.utils import logging

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import ModelHost, Resource, TorchUtilsError, release

HOW, MODEL = sys.argv[1:]
TEXTS = ["give memory back", "the capital of france"]
written: list[int] = []


class Cache(Resource):
    """Embeddings by their text; `_release` writes what is pending."""

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE embeddings (text TEXT, first REAL)")
        self._pending: list[tuple[str, float]] = []

    def add(self, text: str, first: float) -> None:
        self._pending.append((text, first))

    def _release(self) -> None:
        self._database.executemany("INSERT INTO embeddings VALUES (?, ?)", self._pending)
        written.extend(self._database.execute("SELECT count(*) FROM embeddings").fetchone())
        self._database.close()


class Embedder:
    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModel.from_pretrained(path)
        self.pipe = pipeline("feature-extraction", model=model, tokenizer=self.tokenizer)
        self.cache = Cache()

    def embed(self, texts: list[str]) -> torch.Tensor:
        rows = [self.pipe(text, return_tensors=True)[0].mean(0) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            self.cache.add(text, row[0].item())
        return torch.stack(rows)


@lru_cache(maxsize=1)
def get_embedder() -> Embedder:
    return Embedder(MODEL)


class WordSimilarity(nn.Module):
    """Compares words by the embeddings of a model that has been loaded before."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, word: int) -> torch.Tensor:
        return self.words.weight @ self.words.weight[word]


@torch.inference_mode()
def main() -> None:
    logging.disable_progress_bar()
    settle()
    before = anonymous_mb()
    embedder = get_embedder()
    similarity = WordSimilarity(embedder.pipe.model.embeddings.word_embeddings)
    weights, tokenizer = Storages(embedder.pipe.model.encoder.parameters()), embedder.tokenizer
    tokens = tokenizer(TEXTS).input_ids
    vectors, similar = embedder.embed(TEXTS), similarity(7)

    if HOW == "parts":
        release(embedder.pipe, embedder.cache)
        get_embedder.cache_clear()
    elif HOW == "embedder":
        release(embedder)
        get_embedder.cache_clear()
    else:
        host = ModelHost(get_embedder)
        with host.lease() as leased:
            assert leased is embedder
        assert host.status().nbytes > 60e6
        host.unload()
    tell(
        alive_mb=weights.alive_mb(),
        grown_mb=anonymous_mb() - before,
        written=written,
        tokenizes=tokenizer(TEXTS).input_ids == tokens,
        is_similar=torch.equal(similarity(7), similar),
    )

    if HOW == "host":
        try:
            host.lease().__enter__()
        except TorchUtilsError as error:
            assert "do not cache it" in str(error)
        else:
            raise AssertionError("the cached model was leased again")
        get_embedder.cache_clear()
        with host.lease() as leased:
            again = leased.embed(TEXTS)
    else:
        again = get_embedder().embed(TEXTS)
    tell(is_right=torch.equal(again, vectors))


if __name__ == "__main__":
    main()
