"""One key of the metadata of many documents: its different values, sorted, and who has which."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.searching.filters import Condition, fulfils

__all__ = ["MISSING", "Column"]

Array = npt.NDArray[Any]

MISSING = object()
_EXACT = 1 << 53  # whole numbers up to here are what they are in float64 too
_LARGEST = (1 << 63) - 1
_MOST_OTHERS = 64  # values that are neither numbers nor texts


class _Texts(Sequence[str]):
    """Sorted texts, as they are kept in an index: only those that are looked at become objects."""

    def __init__(self, characters: Array, offsets: Array) -> None:
        self._characters, self._offsets = characters, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: Any) -> Any:
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        return bytes(self._characters[start:stop]).decode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Column:
    """The values of one key.

    Attributes:
        codes: The number of each document's value, 0 where the key is missing: shape (n,). Values
            are numbered from 1 on: numbers first, then texts, then the others.
        numbers: The numbers and booleans, in order: shape (m,), int64 or float64.
        texts: The texts, in order.
        others: All others.
    """

    codes: Array
    numbers: Array
    texts: Sequence[str]
    others: Sequence[Any]

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, key: str, metadata: Iterable[Mapping[str, Any]]) -> Column | None:
        """Make it of the metadata of documents; see `of_values`."""
        return cls.of_values([each.get(key, MISSING) for each in metadata])

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> Column | None:
        """Make it of each document's value, or `MISSING`.

        Returns:
            None if it has too many values that are neither numbers nor texts.
        """
        has_floats = any(type(value) is float for value in values)
        most = _EXACT if has_floats else _LARGEST
        numbers, texts, others = set[Any](), set[str](), list[Any]()
        for value in values:
            if isinstance(value, str):
                texts.add(value)
            elif isinstance(value, (int, float)) and abs(value) <= most:
                numbers.add(value)
            elif value is not MISSING and not any(_is_same(value, other) for other in others):
                others.append(value)
                if len(others) > _MOST_OTHERS:
                    return None
        ordered = (*sorted(numbers), *sorted(texts))
        number_of = {value: code for code, value in enumerate(ordered, start=1)}
        codes = np.zeros(len(values), np.uint32)
        for place, value in enumerate(values):
            if isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) <= most):
                codes[place] = number_of[value]
            elif value is not MISSING:
                same = (_is_same(value, other) for other in others)
                codes[place] = 1 + len(ordered) + list(same).index(True)
        kind = np.float64 if has_floats else np.int64
        array = np.asarray(ordered[: len(numbers)], kind)
        return cls(codes, array, ordered[len(numbers) :], others)

    def matches(self, condition: Condition) -> npt.NDArray[np.bool_]:
        """Say which documents fulfil a condition: shape (n,)."""
        _, name, wanted = condition
        if name in ("$ne", "$nin"):
            opposite = "$eq" if name == "$ne" else "$in"
            same = self.matches((condition[0], opposite, wanted))
            return np.asarray(~same & (self.codes != 0), bool)
        each = wanted if name == "$in" else [wanted]
        ranges = [found for value in each for found in self._ranges(name, value)]
        ranges = [(first, last) for first, last in ranges if first <= last]
        if len(ranges) > 1:
            table = np.zeros(1 + len(self.numbers) + len(self.texts) + len(self.others), bool)
            for first, last in ranges:
                table[first : last + 1] = True
            return np.asarray(table[self.codes], bool)
        first, last = ranges[0] if ranges else (1, 0)
        if first == last:
            return np.asarray(self.codes == first, bool)
        return np.asarray((self.codes >= first) & (self.codes <= last), bool)

    def _ranges(self, name: str, wanted: Any) -> list[tuple[int, int]]:
        """Return the codes that fulfil a condition, each as the first and the last one."""
        name = "$eq" if name == "$in" else name
        numbers, texts = len(self.numbers), len(self.texts)
        others: Iterable[tuple[int, Any]] = enumerate(self.others, 1 + numbers + texts)
        ranges = []
        if isinstance(wanted, str):
            ranges.append(_between(self.texts, name, wanted, 1 + numbers, None))
        elif isinstance(wanted, (int, float)):
            if wanted == wanted:
                ranges.append(_between(self.numbers, name, wanted, 1, _item))
        elif wanted is not None and not isinstance(wanted, (list, dict)):
            # Of another type, with a comparison of its own.
            everything = (*self.numbers.tolist(), *self.texts, *self.others)
            others = enumerate(everything, 1)
        return [*ranges, *((code, code) for code, value in others if fulfils(value, name, wanted))]

    def arrays(self) -> dict[str, Array]:
        """Return it as arrays."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in self.texts]
        most = 1 + len(self.numbers) + len(encoded) + len(self.others)
        return {
            "codes": self.codes.astype(np.min_scalar_type(most)),
            "numbers": self.numbers,
            "characters": np.frombuffer(b"".join(encoded), np.uint8),
            "offsets": np.cumsum([0, *map(len, encoded)]).astype(np.uint32),
            "others": np.frombuffer(json.dumps(list(self.others)).encode(), np.uint8),
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, Array]) -> Column:
        """Make it of its arrays again."""
        return cls(
            arrays["codes"],
            arrays["numbers"],
            _Texts(arrays["characters"], arrays["offsets"]),
            json.loads(bytes(arrays["others"])),
        )


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _item(number: Any) -> Any:
    return number.item()  # numpy rounds what it compares with a float.


def _between(
    values: Any, name: str, wanted: Any, first: int, key: Callable[[Any], Any] | None
) -> tuple[int, int]:
    """Return the first and the last code of sorted values that fulfil a condition."""
    left = first + bisect.bisect_left(values, wanted, key=key)
    right = first + bisect.bisect_right(values, wanted, key=key) - 1
    if name == "$eq":
        return left, right
    if name in ("$gt", "$gte"):
        return (right + 1 if name == "$gt" else left), first + len(values) - 1
    return first, (left - 1 if name == "$lt" else right)
