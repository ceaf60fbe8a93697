"""A BERT without padding, from its published files.

The tokens of all texts of a batch are concatenated, so matrix products cover real tokens only,
apart from a few rows at the end. Attention is computed for texts of equal length together. It
needs torch, tokenizers and safetensors. Tests compare it with sentence-transformers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rag_demo.encoding.encoder import Kind, packed
from rag_demo.vectors import Vectors

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
    """

    folder: Path
    hidden: int
    layers: int
    heads: int
    norm_eps: float
    max_tokens: int
    pooling: str
    prompts: dict[str, str]


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
    if own.get("do_lower_case"):
        raise UnsupportedModelError("its texts are lower-cased")
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


TOKENS_PER_TEXT = 64  # tokens in a batch for each text of the batch size
_LONG_CHARS = 20_000
_CHARS_PER_TOKEN = 512  # at most, in any ordinary text
# oneDNN compiles and keeps code for each number of rows, so rows are padded to these multiples.
_FEW_ROWS, _MANY_ROWS = 16, 128
_FREED_BYTES = 31 << 20
_WORDS, _PLACES, _TYPES = (
    f"embeddings_{name}_embeddings_weight" for name in ("word", "position", "token_type")
)


class BertEncoder(nn.Module):
    """An `Encoder` of a BERT with mean or CLS pooling.

    Args:
        settings: The model's settings.
        device: torch's name of the device.
        dtype: The dtype of weights and computation; vectors are float32.

    Raises:
        UnsupportedModelError: The weights do not fit the settings.
    """

    def __init__(self, settings: Settings, device: str, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        super().__init__()
        self.settings = settings
        self.tokenizer = Tokenizer.from_file(str(settings.folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(settings.max_tokens)
        self.tokenizer.no_padding()
        read = load_file(settings.folder / "model.safetensors")
        weights = {name.removeprefix("bert."): value for name, value in read.items()}
        try:
            for layer in range(settings.layers):  # One product makes queries, keys and values.
                own = f"encoder.layer.{layer}.attention"
                for kind in ("weight", "bias"):
                    parts = [f"{own}.self.{part}.{kind}" for part in ("query", "key", "value")]
                    weights[f"{own}.{kind}"] = torch.cat([weights.pop(part) for part in parts])
        except KeyError as error:
            raise UnsupportedModelError(f"its weights have no {error}") from None
        for name, value in weights.items():
            if name.startswith(("embeddings.", "encoder.")):
                # A copy, because the file's pages count neither as taken nor as given back.
                value = value.to(device=device, dtype=dtype, copy=True)
                self.register_buffer(name.replace(".", "_"), value)
        self._has_grown = False
        self.eval()

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        return self.settings.hidden

    def prepare(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """Turn texts into tokens, cut off at the model's limit.

        Args:
            texts: Any strings.
            kind: "query" or "document"; each has a prompt.
        """
        prompt = self.settings.prompts[kind]
        cleaned = [self._cleaned(prompt + text) for text in texts]
        # It omits the positions of tokens in the text.
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(cleaned)]

    @property
    def max_tokens(self) -> int:
        """How many tokens of a text the model reads."""
        return self.settings.max_tokens

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int]:
        """Count the tokens of texts before they are cut off."""
        prompt = self.settings.prompts[kind]
        encodings = self.tokenizer.encode_batch([self._cleaned(prompt + text) for text in texts])
        return [
            sum(len(part.ids) - sum(part.special_tokens_mask) for part in [each, *each.overflowing])
            + sum(each.special_tokens_mask)
            for each in encodings
        ]

    def _cleaned(self, text: str) -> str:
        if len(text) <= _LONG_CHARS:
            return text
        # As much as so many tokens can cover; a word has at least one.
        most = self.settings.max_tokens
        return " ".join(text.split(None, most)[:most])[: most * _CHARS_PER_TOKEN]

    def encode(self, tokens: Sequence[list[int]], batch_size: int) -> Vectors:
        """Embed tokenised texts.

        Args:
            tokens: The tokens of each text.
            batch_size: About how many texts of `TOKENS_PER_TEXT` tokens to compute at once.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
        vectors = np.empty((len(tokens), self.dimension), np.float32)
        if not self._has_grown and self.get_buffer(_WORDS).device.type == "cpu":
            # Freeing a large block raises glibc's threshold for returning heap memory. Otherwise
            # each layer's memory is returned and faulted in again, a sixth of the time.
            torch.empty(_FREED_BYTES, dtype=torch.uint8)
            self._has_grown = True
        with torch.inference_mode():
            for rows in packed(order, lambda row: len(tokens[row]), batch_size * TOKENS_PER_TEXT):
                vectors[rows] = self([tokens[row] for row in rows]).float().cpu().numpy()
        return vectors

    def forward(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Embed one batch of tokens, sorted by length: shape (n, d), each row of length 1."""
        words = self.get_buffer(_WORDS)
        device = words.device
        lengths = [len(text) for text in texts]
        # MKL keeps no code. torch uses oneDNN for other types and without MKL.
        has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        keeps_code = words.dtype != torch.float32 or not has_mkl
        multiple = _FEW_ROWS if sum(lengths) < 4 * _MANY_ROWS else _MANY_ROWS
        spare = [0] * (-sum(lengths) % multiple if keeps_code else 0)
        ids = torch.tensor([*itertools.chain.from_iterable(texts), *spare], device=device)
        places = torch.tensor([*itertools.chain.from_iterable(map(range, lengths)), *spare])
        groups = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
        hidden = functional.embedding(ids, words)
        hidden = hidden + functional.embedding(places.to(device), self.get_buffer(_PLACES))
        hidden = self._norm(hidden + self.get_buffer(_TYPES)[0], "embeddings_LayerNorm")
        for number in range(self.settings.layers):
            hidden = self._layer(hidden, number, groups)
        pooled = []
        for (length, count), rows in zip(groups, _unpacked(hidden, groups), strict=True):
            tokens = rows.view(count, length, -1)
            pooled.append(tokens.mean(dim=1) if self.settings.pooling == "mean" else tokens[:, 0])
        return functional.normalize(torch.cat(pooled).float(), dim=1)

    def _layer(self, hidden: Tensor, number: int, groups: list[tuple[int, int]]) -> Tensor:
        own = f"encoder_layer_{number}"
        attended = self._attend(self._linear(hidden, f"{own}_attention"), groups)
        added = self._linear(attended, f"{own}_attention_output_dense").add_(hidden)
        hidden = self._norm(added, f"{own}_attention_output_LayerNorm")
        # In place, because a new tensor of this size costs more than the function.
        inner = torch.ops.aten.gelu_(self._linear(hidden, f"{own}_intermediate_dense"))
        added = self._linear(inner, f"{own}_output_dense").add_(hidden)
        return self._norm(added, f"{own}_output_LayerNorm")

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, *self._weights(name))

    def _attend(self, projected: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        heads = self.settings.heads
        size = self.settings.hidden // heads
        result = projected.new_empty(len(projected), self.settings.hidden)
        result[sum(length * count for length, count in groups) :].zero_()
        sources, targets = _unpacked(projected, groups), _unpacked(result, groups)
        for (length, count), source, target in zip(groups, sources, targets, strict=True):
            query, key, value = source.view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(query, key, value)
            target.view(count, length, heads, size).copy_(attended.transpose(1, 2))
        return result

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._weights(name)
        return functional.layer_norm(hidden, weight.shape, weight, bias, self.settings.norm_eps)

    def _weights(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_bias")


def _unpacked(hidden: Tensor, groups: list[tuple[int, int]]) -> list[Tensor]:
    """Return the rows of each group of texts of equal length."""
    ends = list(itertools.accumulate((length * count for length, count in groups), initial=0))
    return [hidden[start:stop] for start, stop in itertools.pairwise(ends)]
