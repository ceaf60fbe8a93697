"""Checks of requests against the settings and the model, which a schema cannot describe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import Request

from rag_demo.documents.document import Document
from rag_demo.searching.arguments import check_documents
from rag_demo.service.problems import Problem
from rag_demo.service.schemas import NewDocument
from rag_demo.service.service import Service, service_of


def at_most(count: int, most: int, what: str, param: str) -> None:
    """Check a count against a limit of the settings.

    Raises:
        Problem: It is larger.
    """
    if count > most:
        raise Problem(413, f"{count:,} {what}; at most {most:,} are allowed", param=param)


def check_model(model: str, name: str, model_id: str) -> None:
    """Check that a request names the model that is served.

    Raises:
        Problem: It names another model.
    """
    if model not in (name, model_id, Path(model_id).name, "default"):
        detail = f"the model {model[:200]!r} does not exist; available: {name!r}, 'default'"
        raise Problem(404, detail, param="model", code="model_not_found")


def writable(request: Request) -> Service:
    """Return the service if clients may change the index.

    Raises:
        Problem: They may not.
    """
    service = service_of(request)
    if not service.settings.writable:
        raise Problem(403, "the index is read-only; start the service with --writable")
    return service


def checked_documents(documents: Sequence[NewDocument]) -> list[Document]:
    """Return documents for a retriever.

    Raises:
        Problem: An id occurs twice, or metadata are not JSON.
    """
    fields = [(each.text, each.metadata, each.id) for each in documents]
    try:
        texts, metadata, ids = check_documents(*map(list, zip(*fields, strict=True)))
    except (TypeError, ValueError) as error:
        raise Problem(422, str(error)[:500], param="documents") from None
    return list(map(Document, ids or (), texts, metadata))
