"""The settings of a sentence-transformers model, if it is a BERT that `BertEncoder` can run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POOLING_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class UnsupportedModelError(Exception):
    """`BertEncoder` cannot run the model; sentence-transformers can."""


@dataclass(frozen=True)
class Settings:
    """The settings of a BERT.

    Attributes:
        folder: The folder with the transformer's files.
        hidden: Width of the layers.
        layers, heads: How many layers there are, and how many heads each has.
        norm_eps: The epsilon of the layer norms.
        max_tokens: Longer texts are cut off.
        pooling: "mean" or "cls".
        prompts: The prefix of texts, by "query" and "document".
        lower: Whether texts are lower-cased before they are tokenised.
    """

    folder: Path
    hidden: int
    layers: int
    heads: int
    norm_eps: float
    max_tokens: int
    pooling: str
    prompts: dict[str, str]
    lower: bool


def read_settings(folder: Path) -> Settings:
    """Read the settings from a model's files.

    Raises:
        UnsupportedModelError: The model is not a BERT with mean or CLS pooling in safetensors.
    """
    modules = _json(folder / "modules.json")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(f"its modules are {', '.join(kinds)}")
    where = folder / modules[0]["path"]
    config = _json(where / "config.json")
    wanted = {"model_type": ("bert",), "hidden_act": ("gelu",), "is_decoder": (None, False)}
    wanted["position_embedding_type"] = (None, "absolute")
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise UnsupportedModelError(f"its {key} is {config.get(key)!r}")
    for name in ("model.safetensors", "tokenizer.json"):
        if not (where / name).is_file():
            raise UnsupportedModelError(f"it has no {name}")
    own = _json(where / "sentence_bert_config.json", {})
    limit = own.get("max_seq_length") or _json(where / "tokenizer_config.json", {}).get(
        "model_max_length"
    )
    positions = int(config["max_position_embeddings"])
    return Settings(
        folder=where,
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        max_tokens=min(int(limit or positions), positions),
        pooling=_pooling(_json(folder / modules[1]["path"] / "config.json")),
        prompts=_prompts(_json(folder / "config_sentence_transformers.json", {})),
        lower=bool(own.get("do_lower_case", False)),
    )


def _json(path: Path, default: Any = None) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is None:
            raise UnsupportedModelError(f"it has no {path.name}") from None
        return default
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None


def _pooling(config: dict[str, Any]) -> str:
    mode = config.get("pooling_mode")
    if mode is None:
        chosen = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
        mode = _POOLING_KEYS.get(chosen[0]) if len(chosen) == 1 else None
    if mode not in _POOLING_KEYS.values() or not config.get("include_prompt", True):
        raise UnsupportedModelError("its pooling is neither mean nor CLS")
    return str(mode)


def _prompts(config: dict[str, Any]) -> dict[str, str]:
    prompts = config.get("prompts") or {}
    if config.get("default_prompt_name"):
        raise UnsupportedModelError("it has a default prompt")
    documents = (prompts[name] for name in ("document", "passage", "corpus") if prompts.get(name))
    return {"query": prompts.get("query") or "", "document": next(documents, "")}
