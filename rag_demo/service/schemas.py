"""Request bodies; the OpenAPI description is generated from them."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)

from rag_demo.searching.arguments import MODES, check_weights
from rag_demo.service.responses import Problem
from rag_demo.stores.filters import parse_filter

_MAX_FIELDS = 100  # of a request, with unknown fields
_MAX_DEPTH, _MAX_VALUES, _MAX_FLOAT = 8, 1_000, 1.7e308  # of a filter


def _integer(value: Any) -> Any:
    """Accept 5.0 for 5, as JSON Schema does."""
    return int(value) if type(value) is float and value.is_integer() else value


def _text_only(value: Any) -> Any:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise Problem(
            400,
            "input must be text, not token ids (with LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    return value


Comparable = str | int | float | bool
Score = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_integer)]
Text = Annotated[str, Field(min_length=1)]
Query = Annotated[str, Field(pattern=r"\S")]
# fail_fast: an error for each of millions of items would take minutes.
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
Queries = Annotated[list[Query], Field(fail_fast=True, min_length=1)]
Prompt = Literal["query", "document", "passage", "search_query", "search_document"]
Dimensions = Annotated[
    Count | None, Field(description="Cut off vectors after so many numbers; their length stays 1.")
]
Truncate = Annotated[bool | None, Field(description="false refuses texts that are too long.")]


class Operators(BaseModel):
    """Operators for one key of the metadata."""

    model_config = ConfigDict(extra="forbid")

    eq: Any = Field(None, alias="$eq")
    ne: Any = Field(None, alias="$ne")
    gt: Comparable = Field(0, alias="$gt")
    gte: Comparable = Field(0, alias="$gte")
    lt: Comparable = Field(0, alias="$lt")
    lte: Comparable = Field(0, alias="$lte")
    in_: list[Any] = Field([], alias="$in")
    nin: list[Any] = Field([], alias="$nin")
    contains: Any = Field(None, alias="$contains")


class Conditions(BaseModel):
    """Keys of the metadata with values or operators; ``$and``, ``$or``, ``$not`` combine them."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"patternProperties": {r"^\$(?!(and|or|not)$)": False}}
    )
    __pydantic_extra__: dict[str, Comparable | list[Any] | Operators | None]

    and_: list[Conditions] = Field(default_factory=list, alias="$and", min_length=1)
    or_: list[Conditions] = Field(default_factory=list, alias="$or", min_length=1)
    not_: Conditions = Field(default_factory=dict, alias="$not")  # type: ignore[assignment]


def _check_filter(where: Any, described: Any) -> dict[str, Any]:
    """Check a filter with the store's parser and pass on its message."""
    left = _MAX_VALUES

    def check(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if depth < 0 or left < 0:
            raise ValueError(f"more than {_MAX_DEPTH} levels or {_MAX_VALUES:,} values")
        if isinstance(value, (int, float)) and not abs(value) <= _MAX_FLOAT:
            raise ValueError("a number must be finite and at most 1.7e308")
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                check(item, depth - 1)

    if not isinstance(where, dict):
        raise ValueError("must be a JSON object")
    check(where, _MAX_DEPTH)
    try:
        parse_filter(where)
    except TypeError as error:
        raise ValueError(str(error)) from None
    described(where)  # A value may not be an object, which the parser would accept.
    return where


Where = Annotated[Conditions, WrapValidator(_check_filter)]
"""A filter: a dict, described by `Conditions` and checked by `parse_filter`."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


def _one_of(**fields: Any) -> dict[str, Any]:
    """Describe an object with exactly one of two fields."""
    return {"oneOf": [{"required": [name], "properties": {name: fields[name]}} for name in fields]}


class SearchRequest(_Strict):
    """One query or several: exactly one of ``query`` and ``queries``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            **_one_of(query={"type": "string"}, queries={"type": "array"}),
            "examples": [{"query": "what is a lease?", "where": {"year": {"$gte": 2020}}}],
        },
    )

    query: Query | None = None
    queries: Queries | None = None
    top_k: Count = 5
    min_score: Score | None = Field(None, description="Omit results with a lower score.")
    where: Where | None = None
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="hybrid by default; dense with a min_score."
    )
    rerank: bool = Field(False, description="Order five times top_k results by the reranker.")
    include_text: bool = Field(True, description="Whether results contain their texts.")

    @model_validator(mode="before")
    @classmethod
    def _first_fields(cls, value: Any) -> Any:
        return dict(islice(value.items(), _MAX_FIELDS)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_queries(self) -> SearchRequest:
        if (self.query is None) == (self.queries is None):
            raise ValueError("exactly one of query and queries is required")
        check_weights((1.0, 1.0), self.min_score, self.mode or "dense")
        return self


class EmbeddingsRequest(_Strict):
    """A request of OpenAI's clients; unknown fields are ignored."""

    input: Annotated[Text | Texts, BeforeValidator(_text_only), Field(examples=[["a text"]])]
    model: str = Field("default", json_schema_extra={"enum": ["default"]})
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Dimensions = None
    truncate: Truncate = None
    input_type: Prompt | None = Field(None, description="query embeds the texts as queries.")
    prompt_name: Prompt | None = Field(None, description="The same as input_type.")


class EmbedRequest(_Strict):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    inputs: Text | Texts = Field(examples=["a text"])
    normalize: Literal[True] | None = Field(True, description="Vectors always have length 1.")
    truncate: Truncate = None
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: Prompt | None = None
    dimensions: Dimensions = None


class RerankDocument(BaseModel):
    """A document of Cohere's and Jina's clients."""

    text: Text


Documents = Annotated[list[Text | RerankDocument], Field(fail_fast=True, min_length=1)]


class DocumentsRerankRequest(_Strict):
    """A request of Cohere's and Jina's clients; unknown fields are ignored."""

    query: Query
    documents: Documents
    model: str = "default"
    top_n: Count | None = None
    return_documents: bool | None = Field(None, description="true by default, false on /v2.")
    raw_scores: bool = Field(False, description="Logits instead of scores from 0 to 1.")


class RerankRequest(_Strict):
    """A request of text-embeddings-inference's clients; unknown fields are ignored."""

    query: Query
    texts: Texts
    raw_scores: bool = Field(False, description="Logits instead of scores from 0 to 1.")
    return_text: bool = False
    truncate: Truncate = None


class NewDocument(_Strict):
    """A document to add; it replaces a document with the same id."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[Text, Field(max_length=512)]
    text: Text
    metadata: dict[str, Any] = Field(default_factory=dict)


class DocumentsRequest(_Strict):
    """Documents to add."""

    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[NewDocument], Field(fail_fast=True, min_length=1)]


class DeleteRequest(_Strict):
    """The documents to delete: exactly one of ``ids`` and ``where``."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra=_one_of(
            ids={"type": "array"}, where={"type": "object", "minProperties": 1}
        ),
    )

    ids: Annotated[list[Text], Field(fail_fast=True, min_length=1)] | None = None
    where: Where | None = None

    @model_validator(mode="after")
    def _has_one(self) -> DeleteRequest:
        if (self.ids is None) == (not self.where):
            raise ValueError("exactly one of ids and where is required")
        return self
