"""A float32 linear layer computed by int8 products, which some processors do ten times faster.

Each number is rounded to 16 bits of the greatest one in its row, ``256 * high + low``, and the
two bytes are multiplied as int8. Of the four products of bytes that of low with low is small
and left out. A result errs by some 1e-4 of its norm where float32 does by 2e-7, TF32 by 3e-4
and bfloat16 by 2e-3. Ootomo, Ozaki and Yokota, "DGEMM on integer matrix multiplication unit",
2024, do the same with more bytes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["TwoByteLinear", "with_gelu"]

_GREATEST = 32512.0  # 127 * 256: its high byte does not overflow when the low one is rounded
# Added to a float32 between -32640 and 32639 it leaves that number, rounded and plus 32896, in
# the lowest 16 bits: the bytes are then low + 128 and high + 128, with the carry already done.
_SHIFT = float(2**23 + 2**15 + 2**7)
_LEAST = 1e-30


class TwoByteLinear:
    """A weight and a bias, ready to be applied; see `rag_demo.encoding.linear_layers.LinearLayer`.

    Uses operators that torch made for quantised models, which are private. Rows do not depend
    on each other. What is not finite makes its row not finite.

    Args:
        weight: Shape (out, in), float32, on the CPU.
        bias: Shape (out,).

    Raises:
        RuntimeError: This processor's products of bytes overflow.
    """

    keeps_code, is_wide = True, False

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        if not _products_are_exact():
            raise RuntimeError("products of bytes overflow: a processor without VNNI")
        self._product = torch.ops.onednn.qlinear_pointwise
        self._bias = bias
        numbers, greatest = _two_bytes(weight, spent=False)
        self._scales = greatest.flatten().div_(_GREATEST)
        self._zero_points = torch.zeros(len(weight), dtype=torch.int64)
        # As the rows' do, the bytes of a number come in the order low, high. Masked and shifted
        # in pairs, which takes a fifth of the time of putting them together one by one.
        pairs = (numbers ^ 128).view(torch.int16)
        self._for_high = _packed(pairs & -256)
        self._for_mixed = _packed((pairs << 8) | ((pairs >> 8) & 255))

    def __call__(self, hidden: Tensor, *, gelu: bool = False, spent: bool = False) -> Tensor:
        """See `rag_demo.encoding.linear_layers.LinearLayer`."""
        numbers, greatest = _two_bytes(hidden, spent=spent)
        floats, weights = (1.0, 0, torch.float32), (self._scales, self._zero_points)
        result: Tensor = self._product(
            numbers, 65536.0, 128, self._for_high, *weights, None, *floats, "none", [], ""
        )
        result = self._product.binary(
            *(numbers, 256.0, 128, self._for_mixed, *weights, result, None, *floats),
            *(1.0, 0, "sum", 1.0, "none", [], ""),
        )
        torch.addcmul(self._bias, result, greatest.div_(_GREATEST), out=result)
        return with_gelu(result) if gelu else result


@functools.cache
def _products_are_exact() -> bool:
    """Multiply the greatest bytes; processors without VNNI add two such products in 16 bits."""
    rows = torch.full((64, 128), 255, dtype=torch.uint8)
    weight = _packed(torch.full((64, 64), 127 * 257, dtype=torch.int16))
    scales, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int64)
    product = torch.ops.onednn.qlinear_pointwise(
        *(rows, 1.0, 0, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    )
    return bool((product == 255 * 127 * 128).all())


def with_gelu(hidden: Tensor) -> Tensor:
    """Apply GELU in place: a new tensor of this size costs more than the function does."""
    result: Tensor = torch.ops.aten.gelu_(hidden)
    return result


def _two_bytes(rows: Tensor, *, spent: bool) -> tuple[Tensor, Tensor]:
    """Round rows: shape (n, k) to (n, 2k), uint8, low and high plus 128; and (n, 1), float32."""
    greatest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    factor = _GREATEST / greatest.clamp_(min=_LEAST)
    # Multiplied and shifted in one pass: passes are most of what this way takes with AMX.
    shift = torch.tensor(_SHIFT)
    shifted = torch.addcmul(shift, rows, factor, out=rows if spent else None)
    numbers = shifted.view(torch.int32).to(torch.int16)
    return numbers.view(torch.uint8), greatest


def _packed(pairs: Tensor) -> Tensor:
    """Put pairs of bytes into the layout that the product takes."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(pairs.view(torch.int8), None)
    return packed
