"""Tests of safe_tensor_cleanup."""

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from torch_utils import safe_tensor_cleanup


class WithSlots:
    __slots__ = ("tensor",)


class WithProperty:
    _t: Any = None
    tensor = property(lambda self: self._t, lambda self, value: setattr(self, "_t", value))


class ReadOnly:
    tensor = property(lambda self: (1, 2))


@dataclass(frozen=True)
class Frozen:
    tensor: Any = (1, 2)


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("half built")


@pytest.mark.parametrize("kind", [WithProperty, nn.Module, WithSlots, types.SimpleNamespace])
@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(3)), {"a": torch.ones(3)}])
def test_attribute_becomes_none_and_other_references_keep_its_value(kind: Any, value: Any) -> None:
    owner = kind()
    owner.tensor = value
    assert safe_tensor_cleanup("tensor", owner) is True
    assert getattr(owner, "tensor", None) is None
    assert safe_tensor_cleanup("tensor", owner) is False
    tensor = value["a"] if isinstance(value, dict) else value
    assert tensor.sum() == 3


def test_owner_that_refuses_is_unchanged_and_nothing_raises() -> None:
    for owner in (Frozen(), ReadOnly(), None, WithSlots(), object()):
        before = getattr(owner, "tensor", None)
        assert safe_tensor_cleanup("tensor", owner) is False
        assert getattr(owner, "tensor", None) is before
    assert safe_tensor_cleanup("tensor", Broken()) is False
