"""What every request passes: in which forms it may come, and which are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.serving import ask, search, serving


def test_head_is_a_get_without_a_body(index: Path) -> None:
    """As HTTP says; where there is no GET it is refused as that is."""
    paths = ["/", "/livez", "/readyz", "/metrics", "/v1/models", "/admin/models", "/openapi.json"]
    answers = ask(index, *(("HEAD", path, {}) for path in paths))
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    refused, wrong, unknown = ask(
        index, ("HEAD", "/search", {}), ("POST", "/livez", {}), ("HEAD", "/nothing", {})
    )
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert unknown.status_code == 404


def test_a_target_may_name_its_host(index: Path) -> None:
    """As a proxy's client sends it; that name counts, and not the one in the header."""

    async def main() -> list[int]:
        statuses = []
        async with serving(index) as client:
            for target, host in [
                ("http://localhost/v1/models", b"evil.example"),
                ("HTTP://127.0.0.1:80/v1/models", b"localhost"),
                ("http://localhost", b"localhost"),
                ("http://evil.example/v1/models", b"localhost"),
                ("/v1/models", None),
                ("/v1/models/", b"localhost"),
            ]:
                sent: list[Any] = []
                scope = {
                    "type": "http",
                    "method": "GET",
                    "path": target,
                    "raw_path": target.encode(),
                    "query_string": b"",
                    "headers": [] if host is None else [(b"host", host)],
                    "client": ("127.0.0.1", 1),
                }

                async def receive() -> Any:
                    return {"type": "http.request", "body": b""}

                async def send(message: Any, sent: list[Any] = sent) -> None:
                    sent.append(message)

                await client.app(scope, receive, send)
                statuses.append(sent[0]["status"])
        return statuses

    assert asyncio.run(main()) == [200, 200, 200, 421, 200, 404]


@pytest.mark.parametrize("coding", ["gzip", "x, identity"])
def test_encoded_bodies_are_refused(coding: str, index: Path) -> None:
    """Whatever is in them; plain ones may say that they are."""
    refused, plain = ask(
        index,
        search({"query": "memory"}, **{"content-encoding": coding}),
        search({"query": "memory"}, **{"content-encoding": "Identity"}),
    )
    assert (refused.status_code, plain.status_code) == (415, 200)
    assert "content-encoding" in refused.json()["detail"]


def test_administration_refuses_foreign_host_names(index: Path) -> None:
    """Also where others are served without a token: a page would be of the site that it asks."""
    rebound = {"headers": {"host": "evil.example:8000", "origin": "http://evil.example:8000"}}
    asked = [("GET", path, how) for how in (rebound, {}) for path in ("/admin/models", "/memory")]
    answers = ask(index, *asked, host="0.0.0.0")
    assert [answer.status_code for answer in answers] == [421, 200, 200, 200]


def test_missing_encoding_format_means_floats(index: Path) -> None:
    """Some clients send null for what they do not set."""
    body = {"input": "a", "model": "hashed", "encoding_format": None, "dimensions": None}
    (answer,) = ask(index, ("POST", "/v1/embeddings", {"json": body}))
    assert isinstance(answer.json()["data"][0]["embedding"], list)
