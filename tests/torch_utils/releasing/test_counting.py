"""Tests of the bytes that a report counts."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, index, union-attr"

import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run
from torch_utils import release

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Slotted(nn.Module):
    __slots__ = ("kept",)


def test_freed_bytes_count_tensors_in_slots_containers_and_attributes_of_parameters() -> None:
    slotted, nested, layer = Slotted(), nn.Module(), nn.Linear(1, 1, bias=False)
    slotted.kept = torch.ones(25)
    nested.kept = OrderedDict(a=[({"b": torch.ones(50)},)])
    layer.weight.main_grad = torch.ones(100)
    for module, nbytes in ((slotted, 100), (nested, 200), (layer, 404)):
        report = release(module)
        assert (report.freed_bytes, report.still_held) == ({"host": nbytes}, ())


def test_arrays_in_attributes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Index:
        def __init__(self) -> None:
            self.vectors = {"mean": np.ones(1000), "all": [np.ones(2000)]}
            self.view = self.vectors["mean"][5:]

    assert release(Index()).freed_bytes == {"host": 24_000}
    array, table, index = np.ones(1000), torch.ones(1000), Index()
    index.kept, index.tables = array, {"a": [table]}
    report = release(index)
    assert (report.freed_bytes, report.still_held_bytes) == ({"host": 24_000}, 12_000)
    assert array.sum() == table.sum() == 1000, "what others use keeps its values"
    index = Index()
    monkeypatch.setitem(sys.modules, "numpy", None)  # As tests of a missing numpy do.
    assert release(index).freed_bytes == {"host": 24_000}


def test_release_without_torch_clears_ended_frames() -> None:
    """A retriever may hold arrays only, in a program that never imports torch."""
    program = """
    import sys
    import numpy as np
    from torch_utils import release

    class Part:
        def __init__(self): self.vectors = np.ones(500_000)
        def search(self): raise ValueError(self.vectors.sum())
    class Index:
        def __init__(self): self.part = Part()
    index, kept = Index(), None
    try:
        index.part.search()
    except ValueError as error:
        kept = error
    report = release(index)
    assert (report.freed_bytes, report.still_held, report.errors) == ({"host": 4_000_000}, (), ())
    assert "torch" not in sys.modules
    """
    assert_clean(run(program))
