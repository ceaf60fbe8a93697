"""What requests look like; the OpenAPI description is made of these."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from rag_demo.errors import shown
from rag_demo.searching.arguments import MODES
from rag_demo.service.settings import Limits
from rag_demo.store.filters import OPERATORS, parse_filter

__all__ = [
    "EmbedRequest",
    "EmbeddingsRequest",
    "SearchRequest",
    "StoreSearchRequest",
    "check_filter",
    "narrowed",
]

_MOST = Limits()  # Those of the application are checked where a request is answered.
_FIELDS = 100  # of a request that are looked at, of which some are unknown then
_LARGEST = 2**63  # What a column of whole numbers holds; larger ones are compared as floats.


def _whole(value: Any) -> Any:
    """Take 5.0 for 5, as JSON does."""
    return int(value) if type(value) is float and value.is_integer() else value


Score = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
# Up to the first that is none: an error for each of millions took minutes, and gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
# They are refused anyhow, in words that help, for which so many are enough.
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, max_length=_MOST.texts)]


def check_filter(value: Any, depth: int, values: int) -> int:
    """Count what a filter names.

    Raises:
        ValueError: It is nested deeper than ``depth``, names more than ``values``, or a number
            that is none.
    """
    if depth < 0:
        raise ValueError("it is nested too deep")
    count = 1
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            count += check_filter(each, depth - 1, values - count)
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST_FLOAT:
        raise ValueError("a number must be finite, and no larger than 1.7e308")
    if count > values:
        raise ValueError("it names too many values")
    return count


_LARGEST_FLOAT = 1.7e308


def narrowed(value: Any) -> Any:
    """Return a filter whose whole numbers a column can be compared with."""
    if isinstance(value, dict):
        return {key: narrowed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [narrowed(each) for each in value]
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return float(value)
    return value


# The same filters, for whoever reads the description.
_SCALAR: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}
_COMPARED: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_KEY = {"pattern": "^(?!\\$)"}
_PLAIN = {"propertyNames": _KEY}
_NO_OPERATORS = ["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]  # without their "$"


def _value(depth: int) -> dict[str, Any]:
    if depth == 0:
        return _SCALAR
    inner = _value(depth - 1)
    return {
        "anyOf": [
            _SCALAR,
            {"type": "array", "items": inner},
            {"type": "object", "additionalProperties": inner},
        ]
    }


def _where(depth: int) -> dict[str, Any]:
    value, inner = _value(depth - 2), _value(depth - 3)
    operators = {
        **dict.fromkeys(("$eq", "$ne"), value),
        **dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), _COMPARED),
        **{name: {"type": "array", "items": inner} for name in ("$in", "$nin")},
    }
    either = [
        _SCALAR,
        {"type": "array", "items": value},
        {
            "type": "object",
            "additionalProperties": value,
            **_PLAIN,
            "not": {"minProperties": 1, "propertyNames": {"enum": _NO_OPERATORS}},
        },
        {
            "type": "object",
            "properties": operators,
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
    return {
        "anyOf": [
            {"type": "object", "additionalProperties": {"anyOf": either}, **_PLAIN},
            {"type": "null"},
        ]
    }


def _comparison(types: list[str], value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", "key", "value"],
        "properties": {
            "type": {"enum": types},
            "key": {"type": "string", **_KEY},
            "value": value,
        },
    }


_COMPARISONS = [
    _comparison(["eq", "ne"], {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}]}),
    _comparison(["gt", "gte", "lt", "lte"], _COMPARED),
    _comparison(["in", "nin"], {"type": "array", "items": _SCALAR}),
]


def _filters(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"anyOf": _COMPARISONS}
    compound = {
        "type": "object",
        "required": ["type", "filters"],
        "properties": {
            "type": {"enum": ["and", "or"]},
            "filters": {"type": "array", "minItems": 1, "items": _filters(depth - 1)},
        },
    }
    return {"anyOf": [*_COMPARISONS, compound]}


_TEXT = {"type": "string", "pattern": r"\S", "maxLength": _MOST.query_chars}
_NOT_EMPTY = {"type": "string", "minLength": 1, "maxLength": _MOST.query_chars}


def _one_or_several(text: dict[str, Any], most: int) -> dict[str, Any]:
    several = {"type": "array", "items": text, "minItems": 1, "maxItems": most}
    return {"anyOf": [text, several]}


def _described(schema: dict[str, Any]) -> Any:
    """Say of a field what is checked where it is answered, not where it is read."""

    def replace(made: dict[str, Any]) -> None:
        kept: dict[str, Any] = {
            key: each for key, each in made.items() if key in ("description", "title", "default")
        }
        made.clear()
        made.update(kept, **schema)

    return replace


class SearchRequest(BaseModel):
    """A question, or several: one of ``query`` and ``queries``."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "oneOf": [
                {"required": ["query"], "properties": {"query": {"type": "string"}}},
                {"required": ["queries"], "properties": {"queries": {"type": "array"}}},
            ],
            "examples": [
                {"query": "how is memory given back?", "top_k": 3},
                {
                    "queries": ["what is a lease?", "who holds memory?"],
                    "where": {"year": {"$gte": 2020}},
                    "mode": "dense",
                    "min_score": 0.2,
                },
            ],
        },
    )

    query: str | None = Field(
        None,
        description="The question.",
        json_schema_extra=_described({"anyOf": [_TEXT, {"type": "null"}]}),
    )
    queries: Texts | None = Field(
        None,
        min_length=1,
        description="Several questions.",
        json_schema_extra=_described(
            {
                "anyOf": [
                    {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": _MOST.queries},
                    {"type": "null"},
                ]
            }
        ),
    )
    top_k: Whole = Field(
        5,
        ge=1,
        description="How many answers at most to each.",
        json_schema_extra={"maximum": _MOST.top_k},
    )
    min_score: Score | None = Field(None, description="Leave out what scores lower.")
    where: dict[str, Any] | None = Field(
        None,
        description='Conditions on metadata: {"lang": "en", "year": {"$gte": 2000}}.',
        json_schema_extra=_described(_where(_MOST.where_depth)),
    )
    mode: Literal[MODES] | None = Field(  # type: ignore[valid-type]
        None, description="By default hybrid; dense if there is a min_score."
    )

    @model_validator(mode="before")
    @classmethod
    def _first_fields(cls, given: Any) -> Any:
        return dict(islice(given.items(), _FIELDS)) if isinstance(given, dict) else given

    @field_validator("where")
    @classmethod
    def _filter(cls, where: dict[str, Any] | None) -> dict[str, Any] | None:
        if where is None:
            return None
        check_filter(where, _MOST.where_depth, _MOST.where_values)
        for key in where:
            if key.startswith("$"):
                raise ValueError(
                    "a key is one of the documents' metadata, as answers show them, and below it "
                    f"stands a value or {', '.join(OPERATORS)}; {shown(key)[:40]} is none; for "
                    '"or" there are the filters of /v1/vector_stores/index/search'
                )
        try:
            parse_filter(where)
        except TypeError as error:
            raise ValueError(str(error)) from None
        narrow: dict[str, Any] = narrowed(where)
        return narrow


class EmbeddingsRequest(BaseModel):
    """What OpenAI's clients send; what is not here is not looked at."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"model": "default", "input": ["a text", "another"]}]},
    )

    input: str | Texts | Tokens | TokenLists = Field(
        json_schema_extra=_described(_one_or_several(_NOT_EMPTY, _MOST.texts))
    )
    model: str = "default"
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Whole | None = Field(None, description="Those that the model has, or none.")


class EmbedRequest(BaseModel):
    """What clients of text-embeddings-inference send."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [{"inputs": "a text"}]})

    inputs: str | Texts = Field(
        json_schema_extra=_described(
            _one_or_several({"type": "string", "maxLength": _MOST.query_chars}, _MOST.texts)
        )
    )
    normalize: bool = Field(True, json_schema_extra={"enum": [True]})
    truncate: bool | None = Field(None, description="Texts are cut at what the model reads.")
    prompt_name: Literal["query", "document", "passage"] | None = None
    dimensions: Whole | None = Field(None, description="Those that the model has, or none.")


class RankingOptions(BaseModel):
    """How OpenAI's clients have answers left out; there is one ranker."""

    model_config = ConfigDict(strict=True)

    ranker: str | None = None
    score_threshold: Score | None = Field(None, ge=0, le=1)


class StoreSearchRequest(BaseModel):
    """What OpenAI's clients ask a vector store."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"query": "a question", "max_num_results": 3}]},
    )

    query: str | Texts = Field(json_schema_extra=_described(_one_or_several(_TEXT, _MOST.queries)))
    max_num_results: Whole = Field(10, ge=1, le=50)
    filters: dict[str, Any] | None = Field(
        None,
        json_schema_extra=_described({"anyOf": [_filters(3), {"type": "null"}]}),
    )
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = None
