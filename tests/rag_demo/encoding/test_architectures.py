"""Every architecture goes through the whole product, with the vectors of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel
from tests.support.rag_command import search, succeed
from tests.support.serving import ask
from tests.support.tiny_architectures import NAMES, write_architecture
from tests.support.tiny_model import write_tiny_reranker

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.
QUICK = ("static",)
QUESTION = "how do i give memory back"
SHORT = {"a.txt": "A short note.", "b.txt": "the cache"}
LONG = {"long.txt": "paris is the capital of france . " * 30, "give.txt": "give the memory back"}
TEXTS = [*SHORT.values(), *LONG.values(), "", "   \n", *(f"the city {n} " * n for n in range(40))]


def reference(folder: Path, texts: list[str], kind: str = "document") -> Any:
    from sentence_transformers import SentenceTransformer

    encode: Any = getattr(SentenceTransformer(str(folder), device="cpu"), f"encode_{kind}")
    return encode(texts, normalize_embeddings=True)


def write_files(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in NAMES],
)
def test_architecture_goes_through_index_search_add_serve_rerank_and_release(
    name: str, tmp_path: Path
) -> None:
    folder, index = write_architecture(name, tmp_path / "made"), tmp_path / "index"
    expected, question = reference(folder, TEXTS), reference(folder, [QUESTION], "query")
    reranker = write_tiny_reranker(tmp_path / "reranker", QUESTION, [*SHORT.values()])

    short = write_files(tmp_path / "short", SHORT)
    assert "indexed 2 texts" in succeed("index", short, "--out", index, "--model", folder)
    succeed("add", index, write_files(tmp_path / "long", LONG))
    (found,) = search(index, QUESTION, "--mode", "dense", "--top-k", "9")
    scores = {Path(each["metadata"]["path"]).name: each["score"] for each in found["results"]}
    own = dict(zip([*SHORT, *LONG], (expected[:4] @ question[0]).tolist(), strict=True))
    for file in ("a.txt", "b.txt", "give.txt"):  # The long one has passages as well.
        assert scores[file] == pytest.approx(own[file], abs=1e-5)
    (reranked,) = search(index, QUESTION, "--top-k", "9", "--rerank", reranker)
    assert {each["id"] for each in reranked["results"]} == {each["id"] for each in found["results"]}

    body = {"json": {"input": TEXTS[:4], "input_type": "document"}}
    load = lambda: EmbeddingModel(folder, device="cpu")  # noqa: E731
    options: Any = {"load": load, "retriever": "torch"}
    (embedded,) = ask(index, ("POST", "/v1/embeddings", body), **options)
    assert embedded.status_code == 200, embedded.text
    served = np.array([each["embedding"] for each in embedded.json()["data"]])
    assert np.abs(served - expected[:4]).max() < 1e-5

    with EmbeddingModel(folder, device="cpu") as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-5
        assert np.abs(model.embed_query(QUESTION) - question[0]).max() < 1e-5
        assert model.count_tokens([]) == []
        assert model.unload_model().still_held == ()


@pytest.mark.slow
def test_tokenizer_without_a_padding_token_pads_with_its_last_one(tmp_path: Path) -> None:
    folder = write_architecture("decoder", tmp_path / "made")
    expected = reference(folder, TEXTS)
    (path,) = folder.rglob("tokenizer_config.json")
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "pad_token": None}))
    with pytest.raises(ValueError, match="pad"):
        reference(folder, TEXTS)
    with EmbeddingModel(folder, device="cpu") as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-5
