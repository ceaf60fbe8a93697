"""Choose an encoder for a model, and load it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rag_demo.encoding.encoder import Encoder
from rag_demo.errors import HOW_TO_NAME_MODEL, ModelError

log = logging.getLogger("rag_demo")
_MOVED = f"if it has moved, name its folder: {HOW_TO_NAME_MODEL}"


def load_encoder(
    path: str,
    *,
    name: str,
    device: str,
    dtype: str,
    trust_remote_code: bool = False,
    prompts: Mapping[str, str] | None = None,
) -> Encoder[Any]:
    """Load a model without padding if that is possible, else with sentence-transformers.

    Args:
        path: A folder, or a name on the hub.
        name: The name for error messages.
        device: torch's name of the device.
        dtype: torch's name of the weights' dtype.
        trust_remote_code: Whether to run code that comes with the model.
        prompts: Prompts by kind that replace the model's own.

    Raises:
        ModelError: The model cannot be loaded.
    """
    import torch

    where = Path(path)
    if where.is_absolute() and not where.exists():  # The hub has no such names.
        raise ModelError(f"the model {name!r} cannot be loaded: there is no such folder; {_MOVED}")
    try:
        if where.is_dir() and not trust_remote_code:
            from rag_demo.encoding.bert_encoder import BertEncoder
            from rag_demo.encoding.bert_settings import UnsupportedModelError, read_settings

            try:
                settings = read_settings(where)
                settings = replace(settings, prompts={**settings.prompts, **(prompts or {})})
                return BertEncoder(settings, device, getattr(torch, dtype))
            except UnsupportedModelError as why:
                log.debug("%s is run by sentence-transformers: %s", name, why)
        from rag_demo.encoding.sentence_transformers_encoder import SentenceTransformersEncoder

        return SentenceTransformersEncoder(
            path, device, getattr(torch, dtype), trust_remote_code, prompts
        )
    except ModelError:
        raise
    except Exception as error:
        # The libraries raise many types of errors for a damaged model.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if not where.is_dir():
            reason = (
                f"there is no such folder, and the hub did not return the model: {reason}; {_MOVED}"
            )
        raise ModelError(f"the model {name!r} cannot be loaded: {reason}") from error
