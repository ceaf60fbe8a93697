"""A BERT from its published files, with layers of our own.

Matrix products cover the tokens of a batch without its padding; only attention covers both. It
needs torch, tokenizers and safetensors. Tests compare it with sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from rag_demo.encoding.encoder import Kind, Prompts, limits_of, readable

_SUPPORTED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "is_decoder": False,
    "position_embedding_type": "absolute",
}
_MEAN = ("mean", "pooling_mode_mean_tokens")
_CLS = ("cls", "pooling_mode_cls_token")
_EVEN_ROWS = 16  # oneDNN compiles and keeps code for each number of rows: these multiples only.
_FREED_BYTES = 31 << 20
_WORDS, _PLACES, _TYPES = (
    f"embeddings_{name}_embeddings_weight" for name in ("word", "position", "token_type")
)


class BertEncoder(nn.Module):
    """An `Encoder` for a BERT with mean or CLS pooling.

    Args:
        folder: The folder of the model.
        device: torch's name of the device.
        dtype: The dtype of weights and computation; vectors are float32.
        prompts: Prompts by kind that replace the model's own.

    Raises:
        ValueError, OSError, KeyError: It is something else, or lacks a file, a setting or a weight.
            Try sentence-transformers.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, prompts: Prompts) -> None:
        super().__init__()
        modules = _json(folder / "modules.json")
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ValueError(f"its modules are {', '.join(kinds)}")
        where = folder / modules[0]["path"]
        config = _json(where / "config.json")
        for key, value in _SUPPORTED.items():
            if config.get(key) not in (None, value):
                raise ValueError(f"its {key} is {config[key]!r}")
        pooling = _json(folder / modules[1]["path"] / "config.json")
        chosen = [key for key, value in pooling.items() if key.startswith("pooling_") and value]
        mode = pooling.get("pooling_mode") or ", ".join(chosen)
        if mode not in (*_MEAN, *_CLS) or not pooling.get("include_prompt", True):
            raise ValueError("its pooling is neither mean nor CLS")
        self._is_mean = mode in _MEAN
        own = _json(folder / "config_sentence_transformers.json", {})
        if own.get("default_prompt_name"):
            raise ValueError("it has a default prompt")
        # sentence-transformers has a prompt "document", maybe None, besides "passage" and "corpus".
        known = {**(own.get("prompts") or {}), **prompts}
        self.prompts = {kind: known.get(kind) or "" for kind in ("query", "document")}
        self.is_for_dot_products = own.get("similarity_fn_name") == "dot" and len(kinds) < 3
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._norm_eps = float(config.get("layer_norm_eps", 1e-12))
        self.dimension = int(config["hidden_size"])
        self.max_tokens = _max_tokens(where, int(config["max_position_embeddings"]))
        self.limits = limits_of(device)
        self._tokenizer = Tokenizer.from_buffer((where / "tokenizer.json").read_bytes())
        self._tokenizer.enable_truncation(self.max_tokens)
        self._tokenizer.no_padding()
        for name, value in _weights(where / "model.safetensors", self._layers):
            # A copy, because the file's pages count neither as taken nor as given back.
            value = value.to(device=device, dtype=dtype, copy=True)
            self.register_buffer(name.replace(".", "_"), value)
        self.weights = sum(
            each.numel()
            for name, each in self.named_buffers()
            if name not in (_WORDS, _PLACES, _TYPES)
        )
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
        return readable([self.prompts[kind] + text for text in texts], self.max_tokens)

    def prepare(self, texts: Sequence[str], kind: Kind) -> list[tuple[int, Any]]:
        """Return the number of tokens of each text, cut off at the limit, and their ids."""
        texts = self._prompted(texts, kind)
        if len(texts) == 1:  # A batch would wait for the threads that work on another one.
            encodings = [self._tokenizer.encode(texts[0])]
        else:  # It omits the positions of tokens in the text.
            encodings = self._tokenizer.encode_batch_fast(texts)
        return [(len(each), np.array(each.ids)) for each in encodings]

    def launch(self, inputs: Sequence[Any], kind: Kind) -> Tensor:
        """Embed the ids of tokens."""
        words, is_pinned = self.get_buffer(_WORDS), self.limits.pinned
        ids = np.full((len(inputs), len(inputs[0])), -1)
        for row, each in zip(ids, inputs, strict=True):
            row[: len(each)] = each
        places = np.flatnonzero(ids >= 0)
        if words.is_cpu and words.dtype != torch.float32:  # MKL, for float32, keeps no code.
            # The first token is computed several times.
            places = np.pad(places, (0, -len(places) % _EVEN_ROWS))
        arrays = [ids, places]
        if len(places) != ids.size or ids[-1, -1] < 0:
            arrays.append((ids.ravel() >= 0).cumsum() - 1)
        tensors = [torch.from_numpy(array) for array in arrays]
        if is_pinned:
            tensors = [tensor.pin_memory() for tensor in tensors]
        with torch.inference_mode():
            vectors: Tensor = self(*(t.to(words.device, non_blocking=is_pinned) for t in tensors))
            return vectors

    def forward(self, ids: Tensor, places: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Embed one batch of texts.

        Args:
            ids: The ids of tokens, shape (n, length); -1 is padding.
            places: The places of tokens in ``ids``, as if it had one dimension.
            tokens: The number of the token at each place; padding has that of the token before it.
                None if ``places`` are all places, in their order.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        real = ids >= 0
        mask = None if tokens is None else real[:, None, None]

        def padded(hidden: Tensor) -> Tensor:
            hidden = hidden if tokens is None else hidden.index_select(0, tokens)
            return hidden.view(*ids.shape, -1)

        hidden = functional.embedding(ids.view(-1)[places], self.get_buffer(_WORDS))
        hidden = hidden + functional.embedding(places % ids.shape[1], self.get_buffer(_PLACES))
        hidden = self._norm(hidden + self.get_buffer(_TYPES)[0], "embeddings_LayerNorm")
        for number in range(self._layers):
            own = f"encoder_layer_{number}"
            parts = padded(self._linear(hidden, f"{own}_attention"))
            query, key, value = (
                part.view(*ids.shape, self._heads, -1).transpose(1, 2)
                for part in parts.chunk(3, dim=2)
            )
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            mixed = mixed.transpose(1, 2).reshape(ids.numel(), -1)
            mixed = mixed if tokens is None else mixed.index_select(0, places)
            mixed = self._linear(mixed, f"{own}_attention_output_dense").add_(hidden)
            hidden = self._norm(mixed, f"{own}_attention_output_LayerNorm")
            # In place, because a new tensor of this size costs more than the function.
            inner = torch.ops.aten.gelu_(self._linear(hidden, f"{own}_intermediate_dense"))
            mixed = self._linear(inner, f"{own}_output_dense").add_(hidden)
            hidden = self._norm(mixed, f"{own}_output_LayerNorm")
        hidden = padded(hidden)
        if self._is_mean:
            pooled = (hidden * real[..., None]).sum(dim=1) / real.sum(dim=1)[:, None]
        else:
            pooled = hidden[:, 0]
        return functional.normalize(pooled.float(), dim=1)

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return functional.linear(hidden, *self._weight_and_bias(name))

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self._weight_and_bias(name)
        return functional.layer_norm(hidden, weight.shape, weight, bias, self._norm_eps)

    def _weight_and_bias(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_bias")


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def _max_tokens(folder: Path, positions: int) -> int:
    own = _json(folder / "sentence_bert_config.json", {})
    if own.get("do_lower_case"):
        raise ValueError("its texts are lower-cased")
    of_tokenizer = _json(folder / "tokenizer_config.json", {}).get("model_max_length")
    return min(int(own.get("max_seq_length") or of_tokenizer or positions), positions)


def _weights(path: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are used; one product makes queries, keys and values."""
    weights = {name.removeprefix("bert."): value for name, value in load_file(path).items()}
    for layer in range(layers):
        own = f"encoder.layer.{layer}.attention"
        for kind in ("weight", "bias"):
            parts = [f"{own}.self.{part}.{kind}" for part in ("query", "key", "value")]
            weights[f"{own}.{kind}"] = torch.cat([weights.pop(part) for part in parts])
    for name, value in weights.items():
        if name.startswith(("embeddings.", "encoder.")):
            yield name, value
