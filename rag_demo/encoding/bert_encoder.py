"""A BERT without padding, from its published files.

The tokens of all texts of a batch are concatenated, so matrix products cover real tokens only,
apart from a few rows at the end. Attention is computed for texts of equal length together. It
needs torch, tokenizers and safetensors. Tests compare it with sentence-transformers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from rag_demo.encoding.encoder import CHARS_PER_TOKEN, Kind, packed
from rag_demo.vectors import Vectors

_SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "is_decoder": (None, False),
    "position_embedding_type": (None, "absolute"),
}
_POOLING_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class UnsupportedModelError(Exception):
    """`BertEncoder` cannot run the model; sentence-transformers can."""


TOKENS_PER_TEXT = 64  # tokens in a batch for each text of the batch size
_LONG_CHARS = 20_000
# oneDNN compiles and keeps code for each number of rows, so rows are padded to these multiples.
_FEW_ROWS, _MANY_ROWS = 16, 128
_FREED_BYTES = 31 << 20
_WORDS, _PLACES, _TYPES = (
    f"embeddings_{name}_embeddings_weight" for name in ("word", "position", "token_type")
)


class BertEncoder(nn.Module):
    """A BERT with mean or CLS pooling. One thread encodes at a time.

    Args:
        folder: The folder of the model.
        device: torch's name of the device.
        dtype: The dtype of weights and computation; vectors are float32.
        prompts: Prompts by kind that replace the model's own.

    Attributes:
        dimension: Length of the vectors.
        max_tokens: How many tokens of a text the model reads.

    Raises:
        UnsupportedModelError: The model is not a BERT with mean or CLS pooling in safetensors.
    """

    def __init__(
        self, folder: Path, device: str, dtype: torch.dtype, prompts: Mapping[str, str]
    ) -> None:
        super().__init__()
        modules = _json(folder / "modules.json")
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UnsupportedModelError(f"its modules are {', '.join(kinds)}")
        where = folder / modules[0]["path"]
        config = _json(where / "config.json")
        for key, values in _SUPPORTED.items():
            if config.get(key) not in values:
                raise UnsupportedModelError(f"its {key} is {config.get(key)!r}")
        self._pooling = _pooling(_json(folder / modules[1]["path"] / "config.json"))
        own_prompts = _prompts(_json(folder / "config_sentence_transformers.json", {}))
        self._prompts = {**own_prompts, **prompts}
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._norm_eps = float(config.get("layer_norm_eps", 1e-12))
        self.dimension = int(config["hidden_size"])
        self.max_tokens = _max_tokens(where, int(config["max_position_embeddings"]))
        for name in ("model.safetensors", "tokenizer.json"):
            if not (where / name).is_file():
                raise UnsupportedModelError(f"it has no {name}")
        self._tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
        self._tokenizer.enable_truncation(self.max_tokens)
        self._tokenizer.no_padding()
        for name, value in _weights(where / "model.safetensors", self._layers):
            # A copy, because the file's pages count neither as taken nor as given back.
            value = value.to(device=device, dtype=dtype, copy=True)
            self.register_buffer(name.replace(".", "_"), value)
        self.eval()
        # Freeing a large block raises glibc's threshold for returning heap memory. Otherwise
        # each layer's memory is returned and faulted in again, a sixth of the time.
        torch.empty(_FREED_BYTES, dtype=torch.uint8)

    def count_tokens(self, texts: Sequence[str], kind: Kind) -> list[int]:
        """Count the tokens of texts before they are cut off."""
        special = self._tokenizer.num_special_tokens_to_add(False)
        return [
            special + sum(len(part) - special for part in [each, *each.overflowing])
            for each in self._tokenizer.encode_batch(self._prompted(texts, kind))
        ]

    def _prompted(self, texts: Sequence[str], kind: Kind) -> list[str]:
        return [self._cleaned(self._prompts[kind] + text) for text in texts]

    def _cleaned(self, text: str) -> str:
        if len(text) <= _LONG_CHARS:
            return text
        # As much as so many tokens can cover; a word has at least one.
        most = self.max_tokens
        return " ".join(text.split(None, most)[:most])[: most * CHARS_PER_TOKEN]

    def encode(self, texts: Sequence[str], kind: Kind, batch_size: int) -> Vectors:
        """Embed texts, each cut off at the model's limit.

        Args:
            texts: Any strings.
            kind: "query" or "document"; each has a prompt.
            batch_size: About how many texts of `TOKENS_PER_TEXT` tokens to compute at once.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        # It omits the positions of tokens in the text.
        encodings = self._tokenizer.encode_batch_fast(self._prompted(texts, kind))
        tokens = [each.ids for each in encodings]
        order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
        vectors = np.empty((len(tokens), self.dimension), np.float32)
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
        for number in range(self._layers):
            hidden = self._layer(hidden, number, groups)
        pooled = []
        for (length, count), rows in zip(groups, _unpacked(hidden, groups), strict=True):
            tokens = rows.view(count, length, -1)
            pooled.append(tokens.mean(dim=1) if self._pooling == "mean" else tokens[:, 0])
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
        return functional.linear(hidden, *self._weight_and_bias(name))

    def _attend(self, projected: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        heads = self._heads
        size = self.dimension // heads
        result = projected.new_empty(len(projected), self.dimension)
        result[sum(length * count for length, count in groups) :].zero_()
        sources, targets = _unpacked(projected, groups), _unpacked(result, groups)
        for (length, count), source, target in zip(groups, sources, targets, strict=True):
            query, key, value = source.view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(query, key, value)
            target.view(count, length, heads, size).copy_(attended.transpose(1, 2))
        return result

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._weight_and_bias(name)
        return functional.layer_norm(hidden, weight.shape, weight, bias, self._norm_eps)

    def _weight_and_bias(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_bias")


def _unpacked(hidden: Tensor, groups: list[tuple[int, int]]) -> list[Tensor]:
    """Return the rows of each group of texts of equal length."""
    ends = list(itertools.accumulate((length * count for length, count in groups), initial=0))
    return [hidden[start:stop] for start, stop in itertools.pairwise(ends)]


def _json(path: Path, default: Any = None) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if default is not None and isinstance(error, FileNotFoundError):
            return default
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


def _max_tokens(folder: Path, positions: int) -> int:
    own = _json(folder / "sentence_bert_config.json", {})
    if own.get("do_lower_case"):
        raise UnsupportedModelError("its texts are lower-cased")
    of_tokenizer = _json(folder / "tokenizer_config.json", {}).get("model_max_length")
    return min(int(own.get("max_seq_length") or of_tokenizer or positions), positions)


def _weights(path: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are used; one product makes queries, keys and values."""
    weights = {name.removeprefix("bert."): value for name, value in load_file(path).items()}
    try:
        for layer in range(layers):
            own = f"encoder.layer.{layer}.attention"
            for kind in ("weight", "bias"):
                parts = [f"{own}.self.{part}.{kind}" for part in ("query", "key", "value")]
                weights[f"{own}.{kind}"] = torch.cat([weights.pop(part) for part in parts])
    except KeyError as error:
        raise UnsupportedModelError(f"its weights have no {error}") from None
    for name, value in weights.items():
        if name.startswith(("embeddings.", "encoder.")):
            yield name, value
