"""Formats and clients of OpenAI, LangChain, text-embeddings-inference, Jina and Cohere.

The reranker is a real cross-encoder: the architecture of BERT with random weights.
"""

import base64
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.programs import run
from tests.support.serving import TEXTS, Embedder, ask, search, serving
from tests.support.tiny_model import write_tiny_reranker


def test_base64_and_float_embeddings_are_equal(index: Path) -> None:
    bodies: list[Any] = [
        {"input": TEXTS},
        {"input": TEXTS, "encoding_format": "base64"},
        {"input": TEXTS[1], "dimensions": Embedder.dimension, "encoding_format": None},
    ]
    numbers, encoded, single, models, model = ask(
        index,
        *(("POST", "/v1/embeddings", {"json": body}) for body in bodies),
        *(("GET", path, {}) for path in ("/v1/models", "/v1/models/hashed")),
    )
    assert models.json()["data"] == [model.json()]
    vectors = [each["embedding"] for each in numbers.json()["data"]]
    assert [each["index"] for each in numbers.json()["data"]] == list(range(len(TEXTS)))
    for vector, other in zip(vectors, encoded.json()["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), np.float32)
        assert vector == pytest.approx(decoded)
        assert math.hypot(*vector) == pytest.approx(1)
    assert single.json()["data"][0]["embedding"] == pytest.approx(vectors[1])
    assert numbers.json()["model"] == models.json()["data"][0]["id"]


@pytest.mark.slow
@pytest.mark.anyio
async def test_openai_client_raises_its_own_errors(index: Path) -> None:
    openai = pytest.importorskip("openai", reason="needs openai: the extra test")
    options = {"base_url": "http://127.0.0.1:8000/v1", "max_retries": 0}
    async with serving(index, token="secret-secret-secret") as http:
        client = openai.AsyncOpenAI(api_key="none", http_client=http, **options)
        with pytest.raises(openai.AuthenticationError):
            await client.embeddings.create(model="default", input="a")
        client = client.copy(api_key="secret-secret-secret")
        with pytest.raises(openai.NotFoundError, match="available: 'hashed'"):
            await client.embeddings.create(model="another", input="a")
        wrong: list[Any] = [([], {}), ("", {}), ("a", {"dimensions": 9}), ([[1, 2], [3]], {})]
        for texts, more in wrong:  # LangChain sends tokens by default.
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="default", input=texts, **more)
            assert caught.value.type == "invalid_request_error"
    assert "check_embedding_ctx_length=False" in caught.value.message
    assert (caught.value.code, caught.value.param) == ("token_arrays_unsupported", "input")


def test_embed_accepts_one_text_or_several(index: Path) -> None:
    dimension = Embedder.dimension
    bodies: list[Any] = [
        {"inputs": TEXTS[0]},
        {"inputs": TEXTS, "truncate": True, "prompt_name": "query"},
        {"inputs": TEXTS[0], "truncate": None, "prompt_name": None, "dimensions": dimension},
        {"inputs": TEXTS[0], "dimensions": dimension // 2},
        {"inputs": []},
        {"inputs": ""},
        {"inputs": TEXTS, "normalize": False},
        {"inputs": TEXTS, "dimensions": dimension + 1},
        {"inputs": TEXTS, "prompt_name": "quary"},
        {},
    ]
    one, several, nulls, short, *refused = ask(
        index, *(("POST", "/embed", {"json": body}) for body in bodies)
    )
    assert several.json()[0] == pytest.approx(one.json()[0])
    assert nulls.json() == one.json()
    assert len(several.json()) == len(TEXTS)
    half = np.asarray(one.json()[0])[: dimension // 2]
    assert short.json()[0] == pytest.approx(half / np.linalg.norm(half), abs=1e-6)
    assert [each.status_code for each in refused] == [400, 400, 422, 422, 422, 422]
    assert all(set(each.json()) == {"error", "error_type"} for each in refused)


def test_other_clients_get_their_error_format(index: Path) -> None:
    def fail(texts: Any) -> None:
        raise RuntimeError("no weights")

    unknown, model, rerank, failed, info = ask(
        index,
        ("POST", "/v1/embeddings", {"json": {"input": "a", "model": "other"}}),
        ("GET", "/v1/models/nowhere", {}),
        ("POST", "/rerank", {"json": {"query": "a", "texts": ["b"]}}),
        ("POST", "/embed", {"json": {"inputs": "poison", "prompt_name": "query"}}),
        ("GET", "/info", {}),
        embedder=Embedder(fail),
        served_model_name="given",
    )
    assert unknown.status_code == 404 and "'given'" in unknown.json()["error"]["message"]
    assert model.status_code == 404 and model.json()["error"]["code"] == "model_not_found"
    assert rerank.status_code == 404 and "--reranker" in rerank.json()["error"]
    assert failed.status_code == 424 and failed.json()["error_type"] == "Backend"
    assert (info.json()["model_id"], info.json()["max_batch_tokens"]) == ("given", 32_768)


CLIENTS = {
    "openai": """
import openai
client = openai.OpenAI(base_url=url + "/v1", api_key="none")
found = [each.embedding for each in client.embeddings.create(model="default", input=texts).data]
""",
    "huggingface_hub": """
from huggingface_hub import InferenceClient
client = InferenceClient(model=url)
found = [client.feature_extraction(text, truncate=True)[0].tolist() for text in texts]
""",
    "langchain_openai": """
from langchain_openai import OpenAIEmbeddings
client = OpenAIEmbeddings(
    model="default", check_embedding_ctx_length=False, base_url=url + "/v1", api_key="none"
)
found = client.embed_documents(texts)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_real_client_computes_the_models_values(name: str, index: Path) -> None:
    """A program of its own asks a service on a port."""
    from tests.support.browsing import serving_on_a_port

    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"needs {name}: the dependency group service-test")
    with serving_on_a_port(index) as url:
        start = f"import json\nurl, texts = {url!r}, {TEXTS!r}\n"
        done = run(
            start + CLIENTS[name] + "print(json.dumps(found))",
            env={"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"},
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert np.allclose(found, Embedder().embed_documents(TEXTS), atol=1e-5)


TRANSFORMERS = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.
QUERY = "how do i give memory back"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cross-encoder with one output."""
    pytest.importorskip("transformers", reason="needs the extra rag")
    return write_tiny_reranker(tmp_path_factory.mktemp("reranker"), QUERY, TEXTS)


@pytest.fixture(scope="module")
def logits(reranker: Path) -> list[float]:
    """Return the logits of TEXTS, computed by transformers alone."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reranker).eval()
    with torch.no_grad():
        pairs = tokenizer([QUERY] * len(TEXTS), TEXTS, padding=True, return_tensors="pt")
        found: list[float] = model(**pairs).logits[:, 0].tolist()
    assert max(found) - min(found) > 0.01
    return found


@TRANSFORMERS
def test_scores_are_sigmoids_of_the_logits(index: Path, reranker: Path, logits: Any) -> None:
    """In the shapes of text-embeddings-inference, Jina and Cohere, with their fields."""
    tei = {"query": QUERY, "texts": TEXTS}
    jina = {"query": QUERY, "documents": TEXTS, "model": "tiny-reranker"}
    cohere = {"query": QUERY, "documents": TEXTS, "model": "default", "top_n": 2}
    by_tei, raw, by_jina, same, by_cohere, models, wrong = ask(
        index,
        ("POST", "/rerank", {"json": tei | {"return_text": True}}),
        ("POST", "/rerank", {"json": tei | {"raw_scores": True}}),
        ("POST", "/v1/rerank", {"json": jina}),
        ("POST", "/rerank", {"json": jina}),
        ("POST", "/v2/rerank", {"json": cohere}),
        ("GET", "/v1/models", {}),
        ("POST", "/rerank", {"json": {"query": QUERY, "texts": []}}),
        reranker=str(reranker),
    )
    order = sorted(range(len(TEXTS)), key=lambda row: -logits[row])
    scores = pytest.approx([1 / (1 + math.exp(-logits[row])) for row in order], abs=1e-4)
    texts = [TEXTS[row] for row in order]
    assert [each["index"] for each in by_tei.json()] == order
    assert [each["score"] for each in by_tei.json()] == scores
    assert [each["text"] for each in by_tei.json()] == texts
    found = {each["index"]: each["score"] for each in raw.json()}
    assert [found[row] for row in range(len(TEXTS))] == pytest.approx(logits, abs=1e-3)
    results = by_jina.json()["results"]
    assert [each["relevance_score"] for each in results] == scores
    assert [each["document"]["text"] for each in results] == texts
    assert by_jina.json()["usage"]["total_tokens"] > len(TEXTS) * 8
    assert same.json()["results"] == results
    assert [set(each) for each in by_cohere.json()["results"]] == [{"index", "relevance_score"}] * 2
    assert by_cohere.json()["meta"]["billed_units"] == {"search_units": 1}
    assert [each["id"] for each in models.json()["data"]] == ["hashed", "tiny-reranker"]
    assert wrong.status_code == 400 and wrong.json()["error_type"] == "Empty"


@TRANSFORMERS
def test_search_reranks_in_the_same_call(index: Path, reranker: Path, logits: Any) -> None:
    too_long = {"query": QUERY, "texts": ["word " * 200], "truncate": False}
    searched, long, refused = ask(
        index,
        search({"query": QUERY, "top_k": 2, "rerank": True}),
        ("POST", "/rerank", {"json": {"query": QUERY, "texts": ["word " * 200, "word"]}}),
        ("POST", "/rerank", {"json": too_long}),
        reranker=str(reranker),
    )
    best = sorted(range(len(TEXTS)), key=lambda row: -logits[row])[:2]
    results = searched.json()["results"]
    assert [each["id"] for each in results] == [str(row) for row in best]
    assert [each["rank"] for each in results] == [1, 2]
    assert results[0]["score"] == pytest.approx(1 / (1 + math.exp(-logits[best[0]])), abs=1e-4)
    assert long.headers["x-truncated-texts"] == "1"
    assert refused.status_code == 413
