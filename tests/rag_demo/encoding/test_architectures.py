"""Every architecture goes through the whole product, with the vectors of sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from rag_demo import EmbeddingModel
from tests.support.rag_command import search, succeed, write_lines
from tests.support.serving import ask
from tests.support.tiny_architectures import NAMES, write_architecture
from tests.support.tiny_model import reference_vectors, write_tiny_reranker

# Imported once, and by one worker only.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
QUESTION = "how do i give memory back"
FEW = ["A short note.", "the cache", "give the memory back"]
TEXTS = [
    *FEW,
    "paris is the capital of france . " * 30,
    "",
    "   \n",
    *(f"the city {n} " * n for n in range(40)),
]


@pytest.mark.parametrize("name", NAMES)
def test_architecture_goes_through_index_search_add_serve_rerank_and_release(
    name: str, tmp_path: Path
) -> None:
    folder, index = write_architecture(name, tmp_path / "made"), tmp_path / "index"
    expected = reference_vectors(folder, TEXTS)
    (question,) = reference_vectors(folder, [QUESTION], "query")
    reranker = write_tiny_reranker(tmp_path / "reranker", QUESTION, FEW)

    records = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS[:4])]
    first = write_lines(tmp_path / "first.jsonl", records[:2])
    assert "indexed 2 texts" in succeed("index", first, "--out", index, "--model", folder)
    succeed("add", index, write_lines(tmp_path / "more.jsonl", records[2:]))
    (found,) = search(index, QUESTION, "--mode", "dense", "--top-k", "9")
    scores = {each["id"]: each["score"] for each in found["results"]}
    for number in range(3):  # The fourth has passages as well.
        assert scores[str(number)] == pytest.approx(expected[number] @ question, abs=1e-5)
    (reranked,) = search(index, QUESTION, "--top-k", "9", "--rerank", reranker)
    assert {each["id"] for each in reranked["results"]} == scores.keys()

    body = {"json": {"input": TEXTS[:4], "input_type": "document"}}
    load = lambda: EmbeddingModel(folder, device="cpu")  # noqa: E731
    (embedded,) = ask(index, ("POST", "/v1/embeddings", body), load=load, retriever="torch")
    assert embedded.status_code == 200, embedded.text
    served = np.array([each["embedding"] for each in embedded.json()["data"]])
    assert np.abs(served - expected[:4]).max() < 1e-5

    with EmbeddingModel(folder, device="cpu") as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-5
        assert np.abs(model.embed_query(QUESTION) - question).max() < 1e-5
        assert model.count_tokens([]) == []
        assert model.unload_model().still_held == ()


def test_tokenizer_without_a_padding_token_pads_with_its_last_one(tmp_path: Path) -> None:
    folder = write_architecture("decoder", tmp_path / "made")
    expected = reference_vectors(folder, TEXTS)
    (path,) = folder.rglob("tokenizer_config.json")
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "pad_token": None}))
    with pytest.raises(ValueError, match="pad"):
        reference_vectors(folder, TEXTS)
    with EmbeddingModel(folder, device="cpu") as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-5
