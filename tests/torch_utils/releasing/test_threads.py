"""Tests of releases while other threads release or use the same objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import TIMEOUT_S, assert_clean, run_forked
from tests.support.releasing import optimizer_with_state
from tests.support.threads import in_threads
from torch_utils import CleanupReport, release

pytestmark = pytest.mark.usefixtures("frozen_heap")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("make", "rounds"),
    [
        (lambda: [torch.ones(400) for _ in range(600)], 5),
        (lambda: [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(30)], 3),
        pytest.param(optimizer_with_state, 20, marks=pytest.mark.xdist_group("optimizers")),
    ],
    ids=["tensors", "models", "optimizer"],
)
def test_object_released_by_two_threads_is_in_one_report(
    make: Callable[[], Any], rounds: int
) -> None:
    expected = sum(release(make(), trim_host=False).freed_bytes.values())
    for _ in range(rounds):
        same = make()
        reports = in_threads(*[partial(release, same, trim_host=False)] * 2)
        assert [type(report) for report in reports] == [CleanupReport] * 2, reports
        assert [report.errors for report in reports] == [(), ()]
        # One may have been looking at something at the very moment when the other reported.
        reported = [sum(r.freed_bytes.values()) + r.still_held_bytes for r in reports]
        assert sum(reported) == expected, reported


def test_forked_child_completes_the_release_of_a_thread() -> None:
    program = """
    import os, signal, threading, torch, warnings
    from torch_utils import release
    warnings.simplefilter("ignore")  # Python 3.12 warns of every fork beside threads.

    class Slow:
        def close(self):
            begun.set()
            over.wait()

    begun, over = threading.Event(), threading.Event()
    tensor, other = torch.ones(4), torch.ones(4)
    thread = threading.Thread(target=release, args=(Slow(), tensor))
    thread.start()
    begun.wait()
    process = os.fork()
    if process == 0:
        signal.alarm(300)  # For what hangs.
        release(tensor, other)
        os._exit(tensor.numel() + other.numel())
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    over.set()
    thread.join()
    assert status == 0, status
    assert tensor.numel() == 0 and other.numel() == 4
    """
    assert_clean(run_forked(program, quick_end=True))


def test_long_close_runs_once_and_delays_no_other_release() -> None:
    class Slow:
        def __init__(self) -> None:
            self.closed = 0

        def close(self) -> None:
            self.closed += 1
            begun.set()
            over.wait(TIMEOUT_S)

    begun, over, slow, tensor = threading.Event(), threading.Event(), Slow(), torch.ones(4)
    first = threading.Thread(target=release, args=(slow,))
    first.start()
    begun.wait(TIMEOUT_S)
    assert release(tensor).freed_bytes == {"host": 16}
    assert release(slow).errors == ()
    assert first.is_alive(), "the release did not wait for the close()"
    over.set()
    first.join()
    assert slow.closed == 1


def test_releases_whose_close_releases_the_object_of_the_other_end() -> None:
    class Partner:
        other: Any

        def __init__(self) -> None:
            self.closed = 0

        def close(self) -> None:
            self.closed += 1
            both_close.wait(TIMEOUT_S)
            release(self.other)
            both_close.wait(TIMEOUT_S)

    both_close, first, second = threading.Barrier(2), Partner(), Partner()
    first.other, second.other = second, first
    reports = in_threads(partial(release, first), partial(release, second))
    assert [report.errors for report in reports] == [(), ()]
    assert (first.closed, second.closed) == (1, 1)
