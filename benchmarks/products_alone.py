"""What the matrix products of an encoder take alone: each shape at the best rate of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rag_demo.encoding.bert_encoder import BertEncoder
from rag_demo.encoding.linear_layers import fastest_first

ROWS = 2048  # of a batch
FEW_ROWS = 64  # for which the ways are tried that are there
COUNT = 8  # texts of one length whose attention is timed at once


class ProductsAlone:
    """The products of some texts: linear layers in each way there is, and those of attention.

    A way of linear layers does what has to be done to its rows, as rounding them to bytes is, but
    no activation; softmax is left out of attention. The best rates are kept, so ask more than once.

    Args:
        encoder: Whose products.
        tokens: Of the texts.
    """

    def __init__(self, encoder: BertEncoder, tokens: list[list[int]]) -> None:
        self._layers = encoder.settings.layers
        self._best: dict[str, float] = {}
        self._ways: list[tuple[str, float, Callable[[], Any]]] = []
        total = sum(map(len, tokens))
        dtype = encoder.get_buffer("words").dtype
        rows = min(ROWS, total)
        for layer in ("attention", "out", "up", "down"):
            weight, bias = (encoder.get_buffer(f"0_{layer}_{part}") for part in ("weight", "bias"))
            sample = torch.randn(rows, weight.shape[1]).to(dtype)
            for kind in fastest_first(weight, bias, sample[:FEW_ROWS], many=True):
                hidden = sample.float() if kind.is_wide else sample
                made = kind(weight, bias)
                self._ways.append((layer, total / rows, lambda m=made, h=hidden: m(h)))
        heads = encoder.settings.heads
        for length, count in Counter(map(len, tokens)).items():
            some = min(count, COUNT)
            for each in {dtype, torch.float32}:
                shape = (some * heads, length, encoder.settings.hidden // heads)
                query, key, value = torch.randn(3, *shape).to(each)
                scores = torch.empty(len(query), length, length, dtype=each)

                def attend(q: Any = query, k: Any = key, v: Any = value, s: Any = scores) -> None:
                    torch.bmm(q, k.transpose(1, 2), out=s)
                    torch.bmm(s, v)

                self._ways.append((f"length {length}", count / some, attend))

    def seconds(self) -> float:
        """Time each way once more, and return the sum of what is the best of each so far."""
        with torch.inference_mode():
            for name, times, product in self._ways:
                start = time.perf_counter()
                product()
                taken = (time.perf_counter() - start) * times * self._layers
                self._best[name] = min(taken, self._best.get(name, taken))
        return sum(self._best.values())
