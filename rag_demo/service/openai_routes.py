"""What OpenAI's clients ask: embeddings, and searches of a vector store."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from rag_demo.service.answers import (
    OPENAI_REFUSAL,
    EmbeddingsAnswer,
    ModelCard,
    Serving,
    StorePage,
)
from rag_demo.service.batching import Job
from rag_demo.service.opened import Asked
from rag_demo.service.problems import AsciiJSON, Problem
from rag_demo.service.schemas import (
    EmbeddingsRequest,
    StoreSearchRequest,
    check_filter,
    narrowed,
)
from rag_demo.service.search_routes import check_texts, embedded, running_of
from rag_demo.service.shown import shown_metadata
from rag_demo.store.filters import parse_filter

__all__ = ["STORE", "router", "where_of"]

STORE = "index"
_OPERATORS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")
_LONGEST_ATTRIBUTE = 512  # characters, as OpenAI has it
Store = Annotated[str, Path(json_schema_extra={"enum": [STORE]})]
router = APIRouter(prefix="/v1", responses=OPENAI_REFUSAL, default_response_class=AsciiJSON)


@router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingsAnswer}})
async def embeddings(request: Request, asked: EmbeddingsRequest) -> AsciiJSON:
    """Embed texts; whatever ``model`` is named, the answer says which one it was."""
    running = running_of(request)
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    if not texts:
        raise Problem(400, "input is empty", param="input")
    if not all(isinstance(text, str) for text in texts):
        raise Problem(
            400,
            "input holds tokens, which are of a tokenizer that this model does not have; send "
            "texts (with LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    if not all(texts):
        raise Problem(400, "input holds an empty text", param="input")
    check_texts(running, texts, running.settings.limits.texts, "input")  # type: ignore[arg-type]
    vectors = await embedded(request, texts, asked.dimensions, are_queries=False)  # type: ignore[arg-type]
    shown: Any = vectors.tolist()
    if asked.encoding_format == "base64":
        shown = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors]
    return AsciiJSON(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": row, "embedding": each}
                for row, each in enumerate(shown)
            ],
            "model": running.opened.model_name,
            # Texts are not counted in tokens, and nobody is charged for them.
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }
    )


@router.get("/models", response_model=None, responses={200: {"model": Serving}})
async def models(request: Request) -> AsciiJSON:
    """Name the model."""
    return AsciiJSON({"object": "list", "data": [_card(running_of(request).opened.model_name)]})


@router.get("/models/{model}", response_model=None, responses={200: {"model": ModelCard}})
async def model(request: Request, model: str) -> AsciiJSON:
    """Describe the model, by its name."""
    name = running_of(request).opened.model_name
    if model != name:
        raise Problem(404, f"there is one model here, {name!r}", code="model_not_found")
    return AsciiJSON(_card(name))


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}


@router.post(
    "/vector_stores/{store}/search", response_model=None, responses={200: {"model": StorePage}}
)
async def search(request: Request, store: Store, asked: StoreSearchRequest) -> AsciiJSON:
    """Search the index; scores are cosines. There is one store, named "index"."""
    running = running_of(request)
    if store != STORE:
        raise Problem(404, f"there is one vector store here, {STORE!r}", code="not_found")
    queries = [asked.query] if isinstance(asked.query, str) else asked.query
    check_texts(running, queries, running.settings.limits.queries, "query")
    if not queries or not all(query.strip() for query in queries):
        raise Problem(400, "query is empty", param="query")
    threshold = None if asked.ranking_options is None else asked.ranking_options.score_threshold
    where = None if asked.filters is None else where_of(asked.filters, running.settings.limits)
    wanted = Asked(asked.max_num_results, threshold, where, "dense")
    found = await running.ask(request, Job("search", queries, wanted))
    # Several queries are one search: each document as the best of its answers.
    best: dict[str, Any] = {}
    for result in sorted((each for its in found for each in its), key=lambda each: -each.score):
        best.setdefault(result.id, result)
    return AsciiJSON(
        {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": [_shown(each) for each in list(best.values())[: asked.max_num_results]],
            "has_more": False,
            "next_page": None,
        }
    )


def _shown(result: Any) -> dict[str, Any]:
    start, stop = result.passage or (0, len(result.text))
    metadata = shown_metadata(result.metadata)
    return {
        "file_id": result.id,
        "filename": str(metadata.get("path", metadata.get("source", result.id))),
        "score": min(1.0, max(0.0, result.score)),
        "attributes": {key: _attribute(value) for key, value in metadata.items()},
        "content": [{"type": "text", "text": result.text[start:stop]}],
    }


def _attribute(value: Any) -> str | float | bool:
    if isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LONGEST_ATTRIBUTE]


def where_of(filters: Mapping[str, Any], limits: Any) -> Any:
    """Make a filter of a search of OpenAI's: comparisons, and "and" and "or" of filters.

    Returns:
        A mapping, which is looked up by column, where that can say it; else a function.

    Raises:
        Problem: It is no such filter.
    """
    try:
        # Each level of theirs is two of ours: the filter, and the list that it is in.
        check_filter(dict(filters), 2 * limits.where_depth, limits.where_values)
        return _mapping(filters)
    except (ValueError, TypeError, KeyError) as error:
        raise Problem(400, f"filters cannot be used: {error}"[:300], param="filters") from None


def _mapping(one: Mapping[str, Any]) -> dict[str, Any]:
    if one.get("type") in ("and", "or"):
        parts = one.get("filters")
        if not isinstance(parts, list) or not parts or not all(isinstance(p, dict) for p in parts):
            raise ValueError(f"{one['type']!r} has a list of filters")
        return {f"${one['type']}": [_mapping(part) for part in parts]}
    is_whole = isinstance(one.get("key"), str) and "value" in one
    if one.get("type") not in _OPERATORS or not is_whole:
        raise ValueError(
            f"a comparison has a key, a value, and a type of {', '.join(_OPERATORS)}; "
            "a filter of type and, or has a list of filters"
        )
    value = one["value"]
    if any(isinstance(each, (dict, list)) for each in (value if type(value) is list else [value])):
        raise ValueError("a value is a text, a number, true, false, null, or a list of these")
    where = {one["key"]: {f"${one['type']}": narrowed(value)}}
    parse_filter(where)
    return where
