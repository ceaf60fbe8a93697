"""A BERT that computes nothing for padding, from its published files: no other package's model.

Tokens of all texts of a batch stand behind each other, so matrix products are over real tokens,
but for a few rows at the end; attention is computed for texts of one length together. Needs
torch, tokenizers and safetensors, and is checked against sentence-transformers in the tests.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rag_demo.encoding.bert_settings import Settings, UnsupportedModelError
from rag_demo.encoding.encoder import Kind
from rag_demo.encoding.linear_layers import LinearLayer, TorchLinear, fastest_first
from rag_demo.vectors import Vectors

__all__ = ["BertEncoder"]

TOKENS_PER_TEXT = 64  # what a batch size of texts stands for
_LONG_CHARS = 20_000
_CHARS_PER_TOKEN = 256  # at most, but for marks that no model reads
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
_LONG_WORD = re.compile(rf"([^\W_{_CHINESE}]{{101}})[^\W_{_CHINESE}]+")
_TOKEN_BY_ITSELF = re.compile(rf"[!-/:-@\[-`{{-~{_CHINESE}]")
# To whose multiples the rows of many, or few, texts are filled up, where code is kept for each
# count of rows.
_ROWS = {True: 128, False: 16}
_FREED_BYTES = 31 << 20
# Of a query, and of a batch of many texts: for so many rows the ways are timed. Then vectors are
# compared, of the beginnings of a few texts: a first call waits for all that.
_FEW_ROWS, _MANY_ROWS = 32, 128
_CHECKED_TEXTS, _CHECKED_TOKENS = 4, 32
_LEAST_COSINE = 1 - 1e-5  # of vectors made in another way, in float32

Layers = dict[str, LinearLayer]

log = logging.getLogger("rag_demo")


class BertEncoder(nn.Module):
    """An `Encoder` of a BERT with mean or CLS pooling.

    Args:
        settings: Of the model.
        device: torch's name of the device.
        dtype: Of the weights and of the computation; vectors are float32.

    Raises:
        UnsupportedModelError: The weights are not what the settings say.
    """

    def __init__(self, settings: Settings, device: str, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        super().__init__()
        self.settings = settings
        self.tokenizer = Tokenizer.from_file(str(settings.folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(settings.max_tokens)
        self.tokenizer.no_padding()
        weights = load_file(settings.folder / "model.safetensors")
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""
        try:
            for name, sources in _names(settings.layers).items():
                value = torch.cat([weights[prefix + source] for source in sources])
                self.register_buffer(name, value.to(device=device, dtype=dtype))
        except KeyError as error:
            raise UnsupportedModelError(f"its weights have no {error}") from None
        # Chosen by the first batch, not here: OpenMP's threads, once they have run, make a forked
        # child hang that computes, and a process that only loads must not have any.
        self._chosen: dict[bool, Layers] = {}
        self.truncated = 0
        self.eval()

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        return self.settings.hidden

    def prepare(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """Turn texts into tokens, cut off where the model's limit is; any thread may do so.

        Args:
            texts: Any strings.
            kind: "query" or "document", which decides on the prompt.
        """
        prompt = self.settings.prompts[kind]
        cleaned = [self._cleaned(prompt + text) for text in texts]
        # The fast one leaves out the places of the tokens in their texts.
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        encodings = encode(cleaned)
        self.truncated += sum(bool(encoding.overflowing) for encoding in encodings)
        return [encoding.ids for encoding in encodings]

    def count_tokens(self, tokens: Sequence[list[int]]) -> int:
        """Return how many tokens `prepare` made."""
        return sum(map(len, tokens))

    def _cleaned(self, text: str) -> str:
        if len(text) > _LONG_CHARS:
            text = _beginning(text, self.settings.max_tokens)
        return text.lower() if self.settings.lower else text

    def encode(
        self, tokens: Sequence[list[int]], batch_size: int, *, many: bool = False
    ) -> Vectors:
        """Embed tokenised texts.

        Args:
            tokens: Of each text.
            batch_size: Times `TOKENS_PER_TEXT`: about how many tokens are computed at once.
            many: Whether to compute in the way that is fastest for many texts, or for few;
                float32 vectors of these have a cosine of at least 0.99999 with each other. In
                one way, vectors do not depend on what is computed beside them.

        Returns:
            Shape (n, d), float32, each row of length 1.
        """
        order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
        vectors = np.empty((len(tokens), self.dimension), np.float32)
        with torch.inference_mode():
            for rows in _packed(order, tokens, batch_size * TOKENS_PER_TEXT):
                texts = [tokens[row] for row in rows]
                if many not in self._chosen:
                    self._chosen[many] = self._fastest_layers(texts, many=many)
                made = self(texts, self._chosen[many], many=many)
                vectors[rows] = made.float().cpu().numpy()
        return vectors

    def forward(self, texts: Sequence[Sequence[int]], layers: Layers, *, many: bool) -> Tensor:
        """Embed one batch, sorted by length: shape (n, d), each row of length 1.

        Args:
            texts: The tokens of each.
            layers: The linear layers, by name.
            many: Whether their rows are filled up to multiples for many texts, or for few.
        """
        device = self.get_buffer("words").device
        lengths = [len(text) for text in texts]
        way = layers["0_up"]
        # The count of rows is rounded up where oneDNN makes, and keeps, code for each it meets.
        spare = [0] * (-sum(lengths) % _ROWS[many] if way.keeps_code else 0)
        ids = torch.tensor([*itertools.chain.from_iterable(texts), *spare], device=device)
        places = torch.tensor([*itertools.chain.from_iterable(map(range, lengths)), *spare])
        groups = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
        hidden = self._first_hidden(ids, places.to(device), wide=way.is_wide)
        for number in range(self.settings.layers):
            hidden = self._layer(hidden, number, layers, groups)
        pooled = []
        for (length, count), packed in zip(groups, _unpacked(hidden, groups), strict=True):
            tokens = packed.view(count, length, -1)
            pooled.append(tokens.mean(dim=1) if self.settings.pooling == "mean" else tokens[:, 0])
        return functional.normalize(torch.cat(pooled).float(), dim=1)

    def _first_hidden(self, ids: Tensor, places: Tensor, *, wide: bool = False) -> Tensor:
        hidden = functional.embedding(ids, self.get_buffer("words"))
        hidden = hidden.float() if wide else hidden  # and so is all that is made of it
        hidden = hidden + functional.embedding(places, self.get_buffer("places"))
        return self._norm(hidden + self.get_buffer("types")[0], "first_norm")

    def _layer(
        self,
        hidden: Tensor,
        number: int,
        layers: Layers,
        groups: list[tuple[int, int]],
    ) -> Tensor:
        attended = self._attend(layers[f"{number}_attention"](hidden), groups)
        attended = layers[f"{number}_out"](attended, spent=True)
        hidden = self._norm(attended.add_(hidden), f"{number}_norm")
        inner = layers[f"{number}_up"](hidden, gelu=True)
        inner = layers[f"{number}_down"](inner, spent=True)
        return self._norm(inner.add_(hidden), f"{number}_last_norm")

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

    def _fastest_layers(self, texts: Sequence[Sequence[int]], *, many: bool) -> Layers:
        """Return linear layers of the fastest kind, with which ``texts`` get the same vectors."""
        words = self.get_buffer("words")
        if words.device.type == "cpu":
            # glibc returns the end of its heap to the system once it is twice as large as the
            # largest block of up to 32 MB that was ever freed. Without this one, the memory of
            # each layer is returned and faulted in again, for a sixth of the time in float32.
            torch.empty(_FREED_BYTES, dtype=torch.uint8)
        count = _MANY_ROWS if many else _FEW_ROWS
        ids = torch.arange(count, device=words.device) * 37 % len(words)
        sample = self._first_hidden(ids, torch.zeros_like(ids))
        weight, bias = self._weights("0_up")
        others = [self._weights(f"0_{layer}") for layer in ("attention", "out", "down")]
        plain = self._made_of(TorchLinear)
        for way in fastest_first(weight, bias, sample, others, many=many):
            if way is TorchLinear:
                break
            layers = self._made_of(way)
            some = texts[:: -(-len(texts) // _CHECKED_TEXTS)]
            some = [text[:_CHECKED_TOKENS] for text in some]
            # Half precision has no vectors to keep to: its own rounding is larger than that.
            if weight.dtype != torch.float32 or self._agree(layers, plain, some, many=many):
                log.debug("%s texts are computed by %s", "many" if many else "few", way.__name__)
                return layers
            log.debug("%s is not used: it makes other vectors", way.__name__)
        return plain

    def _agree(
        self, layers: Layers, plain: Layers, texts: Sequence[Sequence[int]], *, many: bool
    ) -> bool:
        made, expected = (self(texts, each, many=many) for each in (layers, plain))
        return bool((made * expected).sum(dim=1).min() >= _LEAST_COSINE)

    def _made_of(self, kind: type) -> Layers:
        names = [
            f"{number}_{layer}"
            for number in range(self.settings.layers)
            for layer in ("attention", "out", "up", "down")
        ]
        return {name: kind(*self._weights(name)) for name in names}

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = (part.to(hidden.dtype) for part in self._weights(name))
        return functional.layer_norm(hidden, weight.shape, weight, bias, self.settings.norm_eps)

    def _weights(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_bias")


# BERT tokenizers remove these without a space, but `str.split` takes them for spaces.
_REMOVED_CONTROLS = dict.fromkeys((0x1C, 0x1D, 0x1E, 0x1F, 0x85))


def _beginning(text: str, tokens: int) -> str:
    """Return as much of a long text as so many tokens can be of, without making tokens of it all.

    A word is a token at least, and so is a sign or a character of Chinese; of a word that is
    longer than a hundred letters only that is seen.
    """
    words = text.translate(_REMOVED_CONTROLS).split(None, tokens)[:tokens]
    text = _LONG_WORD.sub(r"\1", " ".join(words))
    last = next(itertools.islice(_TOKEN_BY_ITSELF.finditer(text), tokens, None), None)
    return text[: len(text) if last is None else last.end()][: tokens * _CHARS_PER_TOKEN]


def _names(layers: int) -> dict[str, tuple[str, ...]]:
    """Say which of the file's tensors make up which of the encoder's."""
    names: dict[str, tuple[str, ...]] = {
        "words": ("embeddings.word_embeddings.weight",),
        "places": ("embeddings.position_embeddings.weight",),
        "types": ("embeddings.token_type_embeddings.weight",),
    }
    places: dict[str, tuple[str, ...]] = {"first_norm": ("embeddings.LayerNorm",)}
    for layer in range(layers):
        own = f"encoder.layer.{layer}"
        projections = (f"{own}.attention.self.{name}" for name in ("query", "key", "value"))
        places[f"{layer}_attention"] = tuple(projections)
        places[f"{layer}_out"] = (f"{own}.attention.output.dense",)
        places[f"{layer}_norm"] = (f"{own}.attention.output.LayerNorm",)
        places[f"{layer}_up"] = (f"{own}.intermediate.dense",)
        places[f"{layer}_down"] = (f"{own}.output.dense",)
        places[f"{layer}_last_norm"] = (f"{own}.output.LayerNorm",)
    for name, modules in places.items():
        for kind in ("weight", "bias"):
            names[f"{name}_{kind}"] = tuple(f"{module}.{kind}" for module in modules)
    return names


def _packed(order: list[int], tokens: Sequence[list[int]], budget: int) -> Iterator[list[int]]:
    """Yield texts that together have about so many tokens; one text at least."""
    batch: list[int] = []
    total = 0
    for row in order:
        if batch and total + len(tokens[row]) > budget:
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += len(tokens[row])
    if batch:
        yield batch


def _unpacked(packed: Tensor, groups: list[tuple[int, int]]) -> list[Tensor]:
    """Return the rows of each group, of so many texts of one length."""
    ends = list(itertools.accumulate((length * count for length, count in groups), initial=0))
    return [packed[start:stop] for start, stop in itertools.pairwise(ends)]
