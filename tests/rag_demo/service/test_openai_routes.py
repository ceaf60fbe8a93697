"""Clients of OpenAI, LangChain and text-embeddings-inference."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from support.serving import TEXTS, Embedder, serving

pytestmark = pytest.mark.xdist_group("openai")
openai: Any = None


@pytest.fixture(scope="module", autouse=True)
def import_openai() -> None:
    """Import openai only in the worker that runs these tests; the import takes seconds."""
    global openai
    openai = pytest.importorskip("openai", reason="needs openai: the extra test")


def with_client(index: Path, use: Any, **options: Any) -> Any:
    """Call ``use`` with OpenAI's client of a service."""

    async def main() -> Any:
        async with serving(index, **options) as http:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://127.0.0.1:8000/v1", http_client=http, max_retries=0
            )
            return await use(client)

    return asyncio.run(main())


def test_base64_and_float_embeddings_are_equal(index: Path) -> None:

    async def use(client: Any) -> Any:
        by_default = await client.embeddings.create(model="default", input=TEXTS)
        numbers = await client.embeddings.create(
            model="default", input=TEXTS, encoding_format="float"
        )
        one = await client.embeddings.create(model="default", input=TEXTS[1], dimensions=8)
        models = (await client.models.list()).data
        assert [await client.models.retrieve(each.id) for each in models] == models
        with pytest.raises(openai.NotFoundError, match="available: 'hashed'"):
            await client.models.retrieve("another")
        return by_default, numbers, one, models

    by_default, numbers, one, models = with_client(index, use)
    vectors = [each.embedding for each in by_default.data]
    assert [each.index for each in by_default.data] == list(range(len(TEXTS)))
    for vector, other in zip(vectors, numbers.data, strict=True):
        assert vector == pytest.approx(other.embedding)
        assert math.hypot(*vector) == pytest.approx(1)
    assert one.data[0].embedding == pytest.approx(vectors[1])
    assert by_default.model == models[0].id


@pytest.mark.parametrize("tokens", [[1, 2, 3], [[1, 2], [3]]])
def test_token_arrays_get_400_with_a_hint(index: Path, tokens: Any) -> None:
    """LangChain sends them by default; the message names its setting."""

    async def use(client: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="default", input=tokens)
        return caught.value

    error = with_client(index, use)
    assert "check_embedding_ctx_length=False" in error.message
    assert error.code == "token_arrays_unsupported"
    assert error.param == "input"


def test_openai_client_raises_its_own_errors(index: Path) -> None:

    async def use(client: Any) -> Any:
        found = []
        wrong: list[Any] = [
            {"input": []},
            {"input": ""},
            {"input": "a", "dimensions": 3},
        ]
        for arguments in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="default", **arguments)
            found.append(caught.value)
        with pytest.raises(openai.NotFoundError):
            await client.vector_stores.search("other", query="a")
        with pytest.raises(openai.BadRequestError):
            await client.vector_stores.search("index", query="a", filters={"type": "near"})
        with pytest.raises(openai.BadRequestError, match="filters/eq/value"):
            await client.vector_stores.search(
                "index", query="a", filters={"type": "eq", "key": "a"}
            )
        return found

    assert all(error.type == "invalid_request_error" for error in with_client(index, use))

    async def without_token(client: Any) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.embeddings.create(model="default", input="a")

    with_client(index, without_token, token="secret")


def test_vector_store_search_applies_filters_and_threshold(index: Path) -> None:

    async def use(client: Any) -> Any:
        everything = await client.vector_stores.search("index", query=TEXTS[1])
        newer: Any = {"type": "gte", "key": "year", "value": 2002}
        either: Any = {
            "type": "or",
            "filters": [newer, {"type": "eq", "key": "year", "value": 2000}],
        }
        return [
            everything,
            await client.vector_stores.search("index", query=TEXTS[1], filters=newer),
            await client.vector_stores.search("index", query=TEXTS[1], filters=either),
            await client.vector_stores.search("index", query=TEXTS[1], max_num_results=1),
            await client.vector_stores.search(
                "index", query=[TEXTS[1], TEXTS[2]], ranking_options={"score_threshold": 0.999}
            ),
        ]

    found = [page.data for page in with_client(index, use)]
    assert found[0][0].file_id == "1"
    assert found[0][0].content[0].text == TEXTS[1]
    assert found[0][0].score == pytest.approx(1)
    years = [{each.attributes["year"] for each in its} for its in found]
    assert years[:4] == [{2000, 2001, 2002, 2003}, {2002, 2003}, {2000, 2002, 2003}, {2001}]
    assert {each.file_id for each in found[4]} == {"1", "2"}


def test_embed_accepts_one_text_or_several(index: Path) -> None:
    dimension = Embedder.dimension

    async def main() -> list[Any]:
        async with serving(index) as client:
            return [
                await client.post("/embed", json={"inputs": inputs, **more})
                for inputs, more in (
                    (TEXTS[0], {}),
                    (TEXTS, {"truncate": True, "prompt_name": "query"}),
                    (TEXTS[0], {"truncate": None, "prompt_name": None, "dimensions": dimension}),
                    ([], {}),
                    (TEXTS, {"normalize": False}),
                    (TEXTS, {"dimensions": dimension // 2}),
                    (TEXTS, {"prompt_name": "quary"}),
                )
            ]

    one, several, nulls, *refused = asyncio.run(main())
    assert several.json()[0] == pytest.approx(one.json()[0])
    assert nulls.json() == one.json()
    assert len(several.json()) == len(TEXTS)
    assert [each.status_code for each in refused] == [422] * 4


def test_langchain_embeds_without_token_arrays(index: Path) -> None:
    langchain = pytest.importorskip(
        "langchain_openai", reason="needs langchain-openai: the dependency group service-test"
    )

    async def main() -> Any:
        async with serving(index) as http:
            settings: Any = {
                "api_key": "none",
                "base_url": "http://127.0.0.1:8000/v1",
                "http_async_client": http,
                "max_retries": 0,
            }
            model = langchain.OpenAIEmbeddings(
                model="default", check_embedding_ctx_length=False, **settings
            )
            return await model.aembed_documents(TEXTS), await model.aembed_query(TEXTS[0])

    documents, query = asyncio.run(main())
    assert len(documents) == len(TEXTS)
    assert query == pytest.approx(documents[0])
