"""Tests of what torch keeps behind a model: cast and packed weights, failed attempts."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

import gc
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run, run_forked
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import SafePyTorchCleanup, find_batch_size, release

pytestmark = pytest.mark.usefixtures("frozen_heap")

INPUTS = torch.ones(1, 4)


def test_release_inside_autocast_frees_the_weights() -> None:
    """Autocast keeps copies of weights, whose graph refers to the weights."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = nn.Linear(4, 4)
        model(INPUTS)
        storages = weak(model)
        release(model)
        assert gone(storages)


class Attempt:
    """What a failed attempt leaves: a reference cycle with a tensor."""

    alive: list[Any] = []  # noqa: RUF012

    def __init__(self, size: int) -> None:
        self.parent = self
        self.data = torch.ones(size)
        Attempt.alive += weak(self.data)


def test_find_batch_size_collects_cycles_of_failed_attempts() -> None:
    Attempt.alive.clear()

    @find_batch_size(starting_batch_size=64)
    def work(size: int) -> int:
        assert all(storage.expired() for storage in Attempt.alive)
        Attempt(size)
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    with without_collector():
        assert work() == 8
    assert len(Attempt.alive) == 4


def test_scope_collects_cycles_after_out_of_memory() -> None:
    Attempt.alive.clear()
    with without_collector(), pytest.raises(torch.OutOfMemoryError):
        with SafePyTorchCleanup() as scope:
            scope.manage(torch.ones(1))
            Attempt(64)
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert gone(Attempt.alive)


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*deprecated.*")
def test_packed_weights_cause_a_collection_because_they_cannot_be_counted() -> None:
    float_model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    try:
        model = torch.ao.quantization.quantize_dynamic(float_model, {nn.Linear})
    except RuntimeError as error:
        pytest.skip(f"this build of torch cannot quantize: {error}")
    with without_collector(), garbage_collections() as generations:
        assert release(model).errors == ()
    assert generations.count(2) == 1
    with without_collector(), garbage_collections() as generations:
        release(nn.Linear(64, 64))
    assert 2 not in generations


@pytest.mark.slow
def test_opaque_layouts_cause_a_collection_and_a_trim() -> None:
    program = """
    import gc, torch, torch.utils.mkldnn
    from torch_utils import memory_snapshot, release

    release(torch.ones(8_000_000))  # raises glibc's threshold for mappings, as loaders do
    def resident(): return memory_snapshot().host.rss_bytes
    def load():
        layers = [torch.nn.Linear(500, 500) for _ in range(60)]
        return torch.utils.mkldnn.to_mkldnn(torch.nn.Sequential(*layers).eval())
    release(load())
    before = resident()
    for _ in range(4):
        release(load())
    assert resident() - before < 30_000_000, resident() - before
    """
    assert_clean(run_forked(program, quick_end=True))


def test_arrays_in_attributes_are_counted_and_trimmed() -> None:
    np = pytest.importorskip("numpy")

    class Index:
        def __init__(self) -> None:
            self.vectors = {"mean": np.ones(1000), "all": [np.ones(2000)]}
            self.view = self.vectors["mean"][5:]

    assert release(Index()).freed_bytes == {"host": 24_000}
    kept, index = np.ones(1000), Index()
    index.kept = kept
    report = release(index)
    assert (report.freed_bytes, report.still_held_bytes) == ({"host": 24_000}, 8000)
    assert kept.sum() == 1000


def test_release_without_objects_returns_what_became_free() -> None:
    model = nn.Linear(4, 4)
    kept = model.weight
    report = release(model)
    assert "release() without arguments" in str(report)
    del kept
    gc.collect()
    report = release()
    assert (report.freed_bytes, report.still_held, report.errors) == ({}, (), ())


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
    assert_clean(run(textwrap.dedent(program)))
