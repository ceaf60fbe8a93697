"""Tests of the sizes of hosted models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from torch_utils import ModelHost, Resource

MB = 1_000_000


def layer() -> nn.Module:
    return nn.Linear(250, 1000, bias=False)


def index() -> Any:
    faiss = pytest.importorskip("faiss")
    wrapped = faiss.IndexIDMap(faiss.IndexFlatL2(25))
    wrapped.add_with_ids(np.ones((10_000, 25), "float32"), np.arange(10_000))
    return wrapped


class Owner(Resource):
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def _release(self) -> None: ...


class Service:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def array_and_view() -> Service:
    array = np.zeros(125_000)
    return Service(array=array, view=array[5:].reshape(5, -1))


CASES: dict[str, Callable[[], Any]] = {
    "module": layer,
    "resource": lambda: Owner(model=layer()),
    "resource in an attribute": lambda: Service(model=Owner(model=layer())),
    "index": index,
    "index beside a small module": lambda: (nn.Identity(), index()),
    "array": lambda: Service(vectors=np.zeros(125_000)),
    "array in a dictionary": lambda: Service(vectors={"a": np.zeros(125_000)}),
    "dictionary of arrays": lambda: {"a": np.zeros(125_000)},
    "array and its view": array_and_view,
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_all_that_a_model_holds_counts_once(make: Callable[[], Any]) -> None:
    with ModelHost(make) as host, host.lease():
        assert host.status().nbytes == MB
