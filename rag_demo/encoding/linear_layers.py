"""Linear layers of an encoder, in the way that is fastest on this processor.

torch has more than one product of matrices, and which one wins depends on the processor, the
type and the count of rows. All but the public one are private operators, so they are tried
beside it, on the model's own weights and activations, before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rag_demo.encoding.two_byte_linear import TwoByteLinear, with_gelu
from torch_utils import measure

__all__ = ["LinearLayer", "TorchLinear", "fastest_first"]

# Of the norm of a product: TF32's error, and four times what the type itself errs by.
_TOLERANCE = {torch.float32: 2.0**-11, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
_TRIES = 4
_GAIN = 0.9  # of torch's own time: what another way takes at most, or it is not worth it


class LinearLayer(Protocol):
    """A weight and a bias, ready to be applied.

    Attributes:
        keeps_code: Whether code is made, and kept, for each count of rows.
        is_wide: Whether it multiplies in float32, whatever its weight was, and so had better get
            float32, and make it.
    """

    keeps_code: bool
    is_wide: bool

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """Apply it to rows: shape (n, in) to (n, out).

        Args:
            hidden: The rows.
            gelu: Whether GELU follows.
            spent: Whether the rows may be overwritten.
        """


class TorchLinear:
    """torch's public product."""

    is_wide = False

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        # MKL does not; oneDNN does, which torch takes for other types and without MKL.
        has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        self.keeps_code = weight.dtype != torch.float32 or not has_mkl

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `LinearLayer`."""
        result = functional.linear(hidden, self._weight, self._bias)
        return with_gelu(result) if gelu else result


class OneDnnLinear:
    """oneDNN's product, with the activation in it: a private operator of torch's compiler."""

    keeps_code, is_wide = True, False

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

    keeps_code, is_wide = False, True

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight.float(), bias.float()

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `LinearLayer`."""
        result = functional.linear(hidden.float(), self._weight, self._bias)
        return (with_gelu(result) if gelu else result).to(hidden.dtype)


def fastest_first(
    weight: Tensor,
    bias: Tensor,
    sample: Tensor,
    others: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    many: bool,
) -> list[Any]:
    """Return the kinds of layers that are right on a sample, the fastest first.

    Takes some milliseconds. OpenMP's threads have run afterwards, so that a forked child that
    computes would hang.

    Args:
        weight, bias: Of a layer that GELU follows.
        sample: Rows for it.
        others: Weights and biases of layers that take such rows, or what this one makes of them;
            without GELU. What is right and fast for one shape need not be so for another.
        many: Whether there will be so many rows that a conversion of them pays.
    """
    kinds: list[Any] = [TorchLinear]
    if weight.device.type == "cpu" and weight.dtype in _TOLERANCE:
        kinds.append(OneDnnLinear)
        if weight.dtype != torch.float32:
            kinds.append(WideLinear)
        elif many:
            kinds.append(TwoByteLinear)
    made = TorchLinear(weight, bias)(sample, gelu=True)
    trials = [_Trial(weight, bias, sample, gelu=True)]
    for other, its_bias in others:
        rows = sample if other.shape[1] == sample.shape[1] else made
        trials.append(_Trial(other, its_bias, rows, gelu=False))
    tried = {kind: _tried(kind, trials) for kind in kinds}
    products = {kind: product for kind, product in tried.items() if product is not None}
    seconds = dict.fromkeys(products, math.inf)
    device = str(sample.device)
    # By turns, and the least of each: what else the machine does meanwhile is no part of it.
    for number in range(_TRIES):
        least = min(seconds.values())
        for kind, product in products.items():
            if number < _TRIES // 2 or seconds[kind] <= 2 * least:  # It may still win.
                taken = measure(product, warmup=0, repeat=1, device=device).device_s
                seconds[kind] = min(seconds[kind], *taken)
    seconds[TorchLinear] *= _GAIN
    return sorted(products, key=lambda kind: seconds[kind])


class _Trial:
    """A layer, rows for it, and what torch's own product makes of them."""

    def __init__(self, weight: Tensor, bias: Tensor, rows: Tensor, *, gelu: bool) -> None:
        self.weight, self.bias, self.rows, self.gelu = weight, bias, rows, gelu
        self.expected = TorchLinear(weight, bias)(rows, gelu=gelu).float()


def _tried(kind: Any, trials: list[_Trial]) -> Callable[[], object] | None:
    """Return the products to be timed; None if their kind is not there or its results are wrong."""
    products = []
    for trial in trials:
        rows = trial.rows.float() if kind.is_wide else trial.rows
        try:
            product = partial(kind(trial.weight, trial.bias), rows, gelu=trial.gelu)
            error = (product().float() - trial.expected).norm() / trial.expected.norm()
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            return None  # A torch without the operator, or whose operator takes something else.
        if kind is not TorchLinear and not error.item() <= _TOLERANCE[trial.weight.dtype]:
            return None
        products.append(product)
    return lambda: [product() for product in products]
