"""Releases while other threads release the same, or compute with it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from torch import nn

from programs import assert_clean, run_forked
from torch_utils import ReleasedError, release
from torch_utils._releasing import faiss_indexes
from torch_utils._releasing.claims import _CLAIMED
from torch_utils._releasing.faiss_indexes import FaissTarget
from torch_utils._releasing.tensors import TensorTarget
from torch_utils.report import CleanupReport


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all at once; return what they returned or raised."""
    results: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:  # Whatever it is, the test is to see it.
            results[index] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def model_of(layers: int = 20) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers))
    )


@pytest.mark.usefixtures("hasty")
def test_two_threads_release_one_model() -> None:
    """No error, and what was given up is reported once."""
    for _ in range(3):
        model = model_of()
        expected = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        reports = in_threads(
            lambda m=model: release(m, trim_host=False), lambda m=model: release(m, trim_host=False)
        )
        assert [type(report) for report in reports] == [CleanupReport] * 2, reports
        assert [report.errors for report in reports] == [(), ()]
        # The other one may have been looking at it at the very moment when one reported.
        freed = sum(report.freed_bytes.get("host", 0) for report in reports)
        assert freed + sum(report.still_held_bytes for report in reports) == expected


def optimizer_with_state() -> torch.optim.Optimizer:
    layer = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(20)).sum().backward()
    optimizer.step()
    return optimizer


def index_with_vectors() -> Any:
    index = faiss.IndexFlatIP(8)
    index.add(np.ones((100, 8), np.float32))
    return index


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(400),
        lambda: [torch.ones(400) for _ in range(600)],
        lambda: [model_of(3) for _ in range(10)],
        optimizer_with_state,
        index_with_vectors,
    ],
    ids=["tensor", "tensors", "models", "optimizer", "index"],
)
def test_one_of_two_threads_reports(make: Callable[[], Any]) -> None:
    """What both release at the same time is in one report, and no error comes of it."""
    expected = sum(release(make(), trim_host=False).freed_bytes.values())
    for _ in range(20):
        same = make()
        reports = in_threads(*[lambda s=same: release(s, trim_host=False)] * 2)
        assert [report.errors for report in reports] == [(), ()]
        told = [sum(r.freed_bytes.values()) + r.still_held_bytes for r in reports]
        assert sum(told) == expected, told
        assert not _CLAIMED


def test_a_claim_ends_with_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread could not give up, another one can."""
    index = index_with_vectors()

    def refuse(found: Any, name: str) -> None:
        raise RuntimeError("this index is being used by another thread")

    monkeypatch.setattr(faiss_indexes, "_refuse_in_use", refuse)
    (report,) = in_threads(lambda: release(index))
    assert "being used" in str(report.errors)
    monkeypatch.undo()
    assert release(index).freed_bytes == {"host": 3200}


def test_a_fork_in_the_middle_of_a_release() -> None:
    """The child has none of the threads that give something up, and may release its copy."""
    result = run_forked("""
    import os, torch
    from torch_utils import release
    from torch_utils._releasing.claims import claim

    tensor = torch.ones(4)
    claim([tensor], "another thread")
    process = os.fork()
    if process == 0:
        release(tensor)
        os._exit(tensor.numel())
    assert os.waitpid(process, 0)[1] == 0
    release(tensor)
    assert tensor.numel() == 4, "the control: the other thread does it"
    """)
    assert_clean(result)


@pytest.mark.parametrize("note", ["note", "note_all"])
def test_weights_that_go_while_they_are_counted(note: str) -> None:
    """One thread counts a model, another empties its weights: a freed storage is not read."""
    result = run_forked(f"""
    import torch
    from torch_utils import release
    from torch_utils._releasing.tensors import empty_tensors
    from torch_utils._releasing.weak_storages import StorageReader

    model = torch.nn.ParameterList(torch.ones(n + 100) for n in range(50))
    weights = list(model)
    weights[0].attribute = "so that it is noted by itself"
    original = StorageReader.{note}

    def note(reader, what):
        empty_tensors(weights)  # As another thread may, just then.
        torch.ones(100)
        return original(reader, what)

    StorageReader.{note} = note
    report = release(model)
    assert (report.freed_bytes, report.still_held, report.errors) == ({{}}, (), ()), report
    """)
    assert_clean(result)


@pytest.mark.usefixtures("hasty")
def test_forward_meets_a_released_error() -> None:
    """Never an AttributeError or a KeyError of a half-emptied layer."""
    inputs = torch.ones(2, 4)
    errors = []
    for _ in range(2):
        model = model_of().eval()

        def forward(model: nn.Module = model) -> None:
            while True:
                model(inputs)

        error, report = in_threads(forward, lambda m=model: release(m, trim_host=False))
        errors.append(error)
        assert report.errors == ()
    assert all(isinstance(error, ReleasedError) for error in errors), errors


def test_giving_up_twice_is_giving_up_once() -> None:
    """As after an interrupt; for modules see test_interrupted_burial."""
    tensor = torch.ones(4)
    target = TensorTarget(tensor, "tensor")
    target.give_up("here")
    target.give_up("here")
    assert tensor.numel() == 0


def test_faiss_closes_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes during the long look for users cannot get in any more."""
    index = faiss.IndexFlatIP(8)
    index.add(np.ones((100, 8), np.float32))
    late: list[Any] = []
    original = faiss_indexes._refuse_stood_on

    def search() -> None:
        try:
            late.append(index.search(np.ones((1, 8), np.float32), 1))
        except BaseException as error:  # Whatever it is, the test is to see it.
            late.append(error)

    def look(*call: Any) -> None:
        thread = threading.Thread(target=search)
        thread.start()
        thread.join()
        original(*call)

    monkeypatch.setattr(faiss_indexes, "_refuse_stood_on", look)
    assert release(index).errors == ()
    assert [isinstance(found, (ReleasedError, AttributeError)) for found in late] == [True]


def test_faiss_one_that_got_in_first_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that began before the proxy was closed: the index is made whole again."""
    index = faiss.IndexFlatIP(8)
    index.add(np.ones((100, 8), np.float32))
    calls: list[str] = []

    def refuse(found: Any, name: str) -> None:
        calls.append(type(found).__name__)
        if len(calls) == 2:  # The second look, with the proxy closed.
            raise RuntimeError("this index is being used by another thread")

    monkeypatch.setattr(faiss_indexes, "_refuse_in_use", refuse)
    (error,) = release(index).errors
    assert "being used" in str(error)
    assert calls == ["IndexFlatIP", "Tombstone"]
    assert index.search(np.ones((1, 8), np.float32), 1)[0].tolist() == [[8.0]]
    assert type(index) is faiss.IndexFlatIP
    monkeypatch.undo()
    assert release(index).freed_bytes == {"host": 3200}


def test_faiss_given_up_twice() -> None:
    """Called again after it was done, it does nothing."""
    index = faiss.IndexFlatIP(8)
    target = FaissTarget(index, "index")
    target._inventory = None  # type: ignore[assignment]
    target.give_up("here")
    target.give_up("here")
    with pytest.raises(ReleasedError):
        index.search(np.ones((1, 8), np.float32), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_tuples_that_others_build() -> None:
    """Looking for who shares a layer never breaks a tuple that another thread is just building.

    The control: a thread that merely has a list of all objects does break them.
    """
    live, stop, broken = nn.Linear(2, 2), threading.Event(), []

    def build() -> None:
        while not stop.is_set():
            try:
                tuple(number for number in range(30))
            except SystemError as error:
                broken.append(error)

    def count(look: Callable[[], object], times: int) -> int:
        broken.clear()
        for _ in range(times):
            look()
            if broken:
                break
        return len(broken)

    def share() -> None:
        keeper = nn.Module()
        keeper.layer = live
        release(nn.Sequential(live, nn.Linear(2, 2)), collect="never", trim_host=False)

    builders = [threading.Thread(target=build) for _ in range(2)]
    for thread in builders:
        thread.start()
    try:
        found = count(share, 4)
        control = count(
            lambda: [thing for thing in gc.get_objects() if type(thing) is nn.Linear], 100
        )
    finally:
        stop.set()
        for thread in builders:
            thread.join()
    assert live(torch.ones(1, 2)).shape == (1, 2)
    assert found == 0
    assert control > 0
