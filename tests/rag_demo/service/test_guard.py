"""The guard: methods, content codings and host names of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.serving import ask, search


def test_head_is_answered_where_get_is(index: Path) -> None:
    paths = ["/", "/livez", "/readyz", "/metrics", "/v1/models", "/admin/models", "/openapi.json"]
    answers = ask(index, *(("HEAD", path, {}) for path in paths))
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    refused, wrong, unknown = ask(
        index, ("HEAD", "/search", {}), ("POST", "/livez", {}), ("HEAD", "/nothing", {})
    )
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert unknown.status_code == 404


@pytest.mark.parametrize("coding", ["gzip", "x, identity"])
def test_compressed_bodies_are_refused(coding: str, index: Path) -> None:
    refused, plain = ask(
        index,
        search({"query": "memory"}, **{"content-encoding": coding}),
        search({"query": "memory"}, **{"content-encoding": "Identity"}),
    )
    assert (refused.status_code, plain.status_code) == (415, 200)
    assert "content-encoding" in refused.json()["detail"]


def test_administration_refuses_foreign_host_names(index: Path) -> None:
    """Otherwise DNS rebinding would let a page of another site administer the service."""
    rebound = {"headers": {"host": "evil.example:8000", "origin": "http://evil.example:8000"}}
    paths = ("/admin/models", "/info")
    requests = [("GET", path, options) for options in (rebound, {}) for path in paths]
    answers = ask(index, *requests, host="0.0.0.0")
    assert [answer.status_code for answer in answers] == [421, 200, 200, 200]
