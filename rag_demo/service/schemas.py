"""Request bodies: how they are parsed, and their models, which make the OpenAPI description."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import Response

from rag_demo.search_request import MODES, check_search
from rag_demo.service.responses import Problem
from rag_demo.stores.filters import Condition, Filter, parse_filter

_SMALL_BYTES = 1 << 16  # of a body
_MOST_MARKS = 250_000  # Quotes and opening brackets in a body; parsing so many takes 50 ms.
_MAX_FILTER_BYTES = 1 << 16
_MAX_CONDITIONS = 64  # of a filter; each is looked up among all documents
_MAX_ITEMS = 5_000  # of a list, or of the metadata of a document, at all depths
_SHOWN_CHARS = 80  # of an unknown field
Item = TypeVar("Item")


class _JSONRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        # orjson keeps Python's lock, so every other request waits until all values are made.
        if sum(map(body.count, (b'"', b"[", b"{"))) - body.count(rb"\"") > _MOST_MARKS:
            raise Problem(413, "the body has too many strings, lists and objects; send it in parts")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            if len(body) > _SMALL_BYTES:
                raise
        try:
            return json.loads(body)  # It takes integers and NaN, which get better errors.
        except (ValueError, RecursionError):  # Of 5,000 digits, or nested as deep.
            raise json.JSONDecodeError("invalid JSON", "", 0) from None


class JSONRoute(APIRoute):
    """A route whose JSON is parsed several times as fast as FastAPI does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route."""
        usual = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await usual(_JSONRequest(request.scope, request.receive))

        return handle


def _as_list(value: Any) -> Any:
    """Accept one text for a list of one text; explain that token ids are not texts."""
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise Problem(
            422,
            "input must be text, not token ids (with LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    return [value] if isinstance(value, str) else value


def _few(values: Any, *, deep: bool = False) -> Any:
    """Refuse a list or an object of too many items before each of them is checked or stored.

    The limits of the service are lower; this one is about the time that a check takes.
    """
    count, parts = 0, [values]
    while parts:
        part = parts.pop()
        if isinstance(part, (list, dict)):
            count += len(part)
            if count > _MAX_ITEMS:
                raise Problem(413, f"more than {_MAX_ITEMS:,} items in a list or an object")
            if deep:
                parts += part.values() if isinstance(part, dict) else part
    return values


def _check_filter(where: dict[str, Any]) -> dict[str, Any]:
    """Check a filter with the store's parser and pass on its message."""
    try:
        text = orjson.dumps(where)  # Fails for integers over 64 bits, and for deep nesting.
        if len(text) > _MAX_FILTER_BYTES:  # Parsing one of megabytes takes seconds.
            raise ValueError(f"must have at most {_MAX_FILTER_BYTES:,} bytes")
        count = _count(parse_filter(where))
    except TypeError as error:
        raise ValueError(str(error)) from None
    if orjson.loads(text) != where:  # NaN and infinity
        raise ValueError("must have finite numbers")
    if count > _MAX_CONDITIONS:
        raise ValueError(f"must have at most {_MAX_CONDITIONS} conditions, got {count}")
    return where


def _count(part: Filter) -> int:
    return 1 if isinstance(part, Condition) else sum(map(_count, part.parts))


Score = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=False)]  # 5.0 is 5, as in JSON Schema.
Neighbors = Annotated[
    int,
    Field(ge=0, le=10, description="Passages before and after a result that its text includes."),
]
Text = Annotated[str, Field(min_length=1)]
Query = Annotated[str, Field(pattern=r"\S")]
# fail_fast: an error for each of millions of items would take minutes.
Several = Annotated[list[Item], Field(fail_fast=True, min_length=1), BeforeValidator(_few)]
Texts = Several[Text]
Queries = Several[Query]
TextOrTexts = Annotated[
    Texts,
    BeforeValidator(_as_list, json_schema_input_type=Text | Texts),
    Field(examples=["a text"]),
]
Metadata = Annotated[dict[str, Any], BeforeValidator(partial(_few, deep=True))]
Prompt = Literal["query", "document", "passage", "search_query", "search_document"]
Dimensions = Annotated[
    Count | None, Field(description="Cut off vectors after so many numbers; their length stays 1.")
]
Truncate = Annotated[bool | None, Field(description="false refuses texts that are too long.")]
Where = Annotated[
    dict[str, Any],
    AfterValidator(_check_filter),
    Field(
        description="Keys of the metadata with a value, a list of values, or operators such as "
        "$gte; $and, $or and $not combine filters.",
        examples=[{"year": {"$gte": 2020}}],
    ),
]


class _Strict(BaseModel):
    """A request; unknown fields are ignored, as the original services do."""

    model_config = ConfigDict(strict=True)


class _Own(_Strict):
    """A request of this service alone; unknown fields are refused.

    `extra="forbid"` would make an error for each of a million fields.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _knows_all_fields(self) -> Self:
        for name in self.model_extra or ():
            raise ValueError(f"the field {name[:_SHOWN_CHARS]!r} is unknown")
        return self


def _one_of(*names: str, **schema: Any) -> ConfigDict:
    given: Any = [{"required": [n], "properties": {n: {"not": {"type": "null"}}}} for n in names]
    return ConfigDict(json_schema_extra={"oneOf": given, **schema})


class SearchRequest(_Own):
    """One query or several: exactly one of ``query`` and ``queries``."""

    model_config = _one_of("query", "queries", additionalProperties=False)

    query: Query | None = Field(None, examples=["what is a lease?"])
    queries: Queries | None = None
    top_k: Count = 5
    min_score: Score | None = Field(None, description="Omit results with a lower score.")
    where: Where | None = None
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="hybrid by default; dense with a min_score."
    )
    rerank: bool = Field(False, description="Order five times top_k results by the reranker.")
    include_text: bool = Field(True, description="Whether results contain their texts.")
    neighbors: Neighbors = 0

    @model_validator(mode="after")
    def _has_queries(self) -> SearchRequest:
        if (self.query is None) == (self.queries is None):
            raise ValueError("exactly one of query and queries is required")
        check_search([], 1, self.min_score, self.mode or "dense", (1.0, 1.0))
        return self


class EmbeddingsRequest(_Strict):
    """A request of OpenAI's clients."""

    input: TextOrTexts
    model: str = Field("default", json_schema_extra={"enum": ["default"]})
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Dimensions = None
    truncate: Truncate = None
    input_type: Prompt | None = Field(None, description="query embeds the texts as queries.")
    prompt_name: Prompt | None = Field(None, description="The same as input_type.")


class EmbedRequest(_Strict):
    """A request of text-embeddings-inference's clients."""

    inputs: TextOrTexts
    normalize: Literal[True] | None = Field(True, description="Vectors always have length 1.")
    truncate: Truncate = None
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: Prompt | None = None
    dimensions: Dimensions = None


class RerankDocument(BaseModel):
    """A document of Cohere's and Jina's clients."""

    text: Text


Documents = Several[Text | RerankDocument]


class RerankRequest(_Strict):
    """``texts`` as TEI's clients send, or Cohere's and Jina's ``documents``."""

    model_config = _one_of("texts", "documents")

    query: Query
    texts: Texts | None = None
    documents: Documents | None = None
    model: str = "default"
    top_n: Count | None = None
    raw_scores: bool = Field(False, description="Logits instead of scores from 0 to 1.")
    return_text: bool = False
    return_documents: bool | None = Field(None, description="true by default, false on /v2.")
    truncate: Truncate = None

    @model_validator(mode="after")
    def _has_texts(self) -> RerankRequest:
        if (self.texts is None) == (self.documents is None):
            raise ValueError("exactly one of texts and documents is required")
        return self


class NewDocument(_Own):
    """A document to add; it replaces one with the same id. The index chooses missing ids."""

    id: Annotated[Text, Field(max_length=512)] | None = None
    text: Text
    metadata: Metadata = Field(default_factory=dict)


class DocumentsRequest(_Own):
    """Documents to add."""

    documents: Several[NewDocument]


class DeleteRequest(_Own):
    """The documents to delete: exactly one of ``ids`` and ``where``, which must not be empty."""

    ids: Texts | None = None
    where: Where | None = None

    @model_validator(mode="after")
    def _has_one(self) -> DeleteRequest:
        if (self.ids is None) == (not self.where):
            raise ValueError("exactly one of ids and where is required")
        return self
