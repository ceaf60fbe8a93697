"""Linear layers of an encoder, in the way that is fastest on this processor.

torch has more than one product of matrices, and which one wins depends on the processor, the
type and the count of rows. All but the public one are private operators, so they are tried
beside it, on the model's own weights and activations, before they are used.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rag_demo.encoding.two_byte_linear import TwoByteLinear, with_gelu
from torch_utils import measure

__all__ = ["LinearLayer", "TorchLinear", "fastest_first"]

# Of the norm of a product: TF32's error, and four times what the type itself errs by.
_TOLERANCE = {torch.float32: 2.0**-11, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
_TRIES = 3


class LinearLayer(Protocol):
    """A weight and a bias, ready to be applied."""

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """Apply it to rows: shape (n, in) to (n, out).

        Args:
            hidden: The rows.
            gelu: Whether GELU follows.
            spent: Whether the rows may be overwritten.
        """


class TorchLinear:
    """torch's public product."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `LinearLayer`."""
        result = functional.linear(hidden, self._weight, self._bias)
        return with_gelu(result) if gelu else result


class OneDnnLinear:
    """oneDNN's product, with the activation in it: a private operator of torch's compiler."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self._product = torch.ops.mkldnn._linear_pointwise

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `LinearLayer`."""
        activation: tuple[Any, ...] = ("gelu", [], "none") if gelu else ("none", [], "")
        result: Tensor = self._product(hidden, self._weight, self._bias, *activation)
        return result


class WideLinear:
    """The product in float32 of weights and rows that are not: for processors that lack theirs."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight.float(), bias.float()

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `LinearLayer`."""
        result = functional.linear(hidden.float(), self._weight, self._bias)
        return (with_gelu(result) if gelu else result).to(hidden.dtype)


def fastest_first(weight: Tensor, bias: Tensor, sample: Tensor, *, many: bool) -> list[Any]:
    """Return the kinds of layers that are right on a sample, the fastest first.

    Takes some milliseconds. OpenMP's threads have run afterwards, so that a forked child that
    computes would hang.

    Args:
        weight, bias: Of one of the layers.
        sample: Rows for it.
        many: Whether there will be so many rows that a conversion of them pays.
    """
    kinds: list[Any] = [TorchLinear]
    if weight.device.type == "cpu" and weight.dtype in _TOLERANCE:
        kinds.append(OneDnnLinear)
        if weight.dtype != torch.float32:
            kinds.append(WideLinear)
        elif many:
            kinds.append(TwoByteLinear)
    expected = TorchLinear(weight, bias)(sample, gelu=True)
    seconds = {kind: _try(kind, weight, bias, sample, expected) for kind in kinds}
    right = [kind for kind in kinds if seconds[kind] is not None]
    return sorted(right, key=lambda kind: seconds[kind] or 0.0)


def _try(kind: Any, weight: Tensor, bias: Tensor, sample: Tensor, expected: Tensor) -> float | None:
    """Time a kind of layer; None if it is not there or its results are wrong."""
    try:
        layer = kind(weight, bias)
        error = (layer(sample, gelu=True) - expected).float().norm() / expected.float().norm()
        if kind is not TorchLinear and not error.item() <= _TOLERANCE[weight.dtype]:
            return None
        device = str(sample.device)
        taken = measure(lambda: layer(sample, gelu=True), warmup=0, repeat=_TRIES, device=device)
        return min(taken.device_s)  # What else the machine did meanwhile is no part of it.
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None  # A torch without the operator, or whose operator takes something else.
