"""What is said of a request that is not what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import ask, search


def test_a_forgotten_content_type_is_said(index: Path) -> None:
    """It is what a newcomer's first curl lacks."""
    body = b'{"query": "a"}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    (answer,) = ask(index, ("POST", "/search", {"content": body, "headers": form}))
    assert answer.status_code == 422
    assert "content-type: application/json" in answer.json()["detail"]


def test_a_key_that_is_none_is_said_for_http(index: Path) -> None:
    """With what is possible over HTTP, where nobody can give a function of Python."""
    (answer,) = ask(index, search({"query": "memory", "where": {"$foo": 1}}))
    (said,) = answer.json()["errors"]
    assert said["pointer"] == "#/where"
    for wanted in ("metadata", "'$foo'", "$nin", "/v1/vector_stores/index/search"):
        assert wanted in said["detail"]
    assert "function" not in said["detail"]


@pytest.mark.parametrize(
    ("sent", "pointer", "said"),
    [
        ({"json": []}, "#", "has to be a JSON object"),
        (
            {"content": b"1", "headers": {"content-type": "text/plain"}},
            "#",
            "has to be a JSON object",
        ),
        ({}, "#", "there is no body; send a JSON object"),
        ({"json": {"query": 1}}, "#/query", "has to be a text"),
        ({"json": {"query": "a", "where": 1}}, "#/where", "has to be a JSON object"),
    ],
)
def test_a_wrong_body_is_said_in_plain_words(
    index: Path, sent: dict[str, Any], pointer: str, said: str
) -> None:
    """Not in those of the library that found it, and with a pointer that leads somewhere."""
    (answer,) = ask(index, ("POST", "/search", sent))
    (error,) = answer.json()["errors"]
    assert error["pointer"] == pointer
    assert said in error["detail"]
