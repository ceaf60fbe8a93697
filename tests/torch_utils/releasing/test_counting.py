"""Tests of the bytes that a report counts."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, operator, union-attr"

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn

from torch_utils import release

pytestmark = pytest.mark.usefixtures("frozen_heap")

BYTES = 4_000_000


def big() -> torch.Tensor:
    return torch.ones(BYTES // 4)


class Slotted(nn.Module):
    __slots__ = ("kept",)


def in_slot() -> nn.Module:
    module = Slotted()
    module.kept = big()
    return module


def in_nested_containers() -> nn.Module:
    module = nn.Module()
    module.kept = OrderedDict(a=[({"b": big()},)])
    return module


def in_attribute_of_a_parameter() -> nn.Module:
    module = nn.Linear(1, 1)
    module.weight.main_grad = big()
    return module


PLACES = [in_slot, in_nested_containers, in_attribute_of_a_parameter]


@pytest.mark.parametrize("make", PLACES)
def test_freed_bytes_count_tensors_in_any_container(make: Callable[[], nn.Module]) -> None:
    report = release(make())
    assert report.errors == ()
    assert 0 <= report.freed_bytes["host"] - BYTES < 1000
    assert report.still_held == ()


def test_plain_dictionaries_beside_a_tensor_are_looked_at_once() -> None:
    """A retriever has one for each document; each may cost one call, not a walk of its own."""
    retriever = nn.Module()
    retriever.vectors = big()
    retriever.documents = [{"id": str(n), "text": "a", "page": n} for n in range(10_000)]
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        report = release(retriever, collect="never")
    finally:
        sys.setprofile(before)
    assert report.freed_bytes == {"host": BYTES}
    assert calls < 15_000
