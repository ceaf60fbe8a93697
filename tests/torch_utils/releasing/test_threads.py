"""Tests of releases while other threads release or use the same objects."""

import threading
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import TIMEOUT_S, assert_clean, run_forked
from tests.support.threads import in_threads
from torch_utils import CleanupReport, release

pytestmark = pytest.mark.usefixtures("frozen_heap")


def tensors_and_models() -> list[Any]:
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(30)]
    return [*models, *(torch.ones(400) for _ in range(100))]


@pytest.mark.usefixtures("hasty")
def test_object_released_by_two_threads_is_in_one_report() -> None:
    expected = sum(release(tensors_and_models(), trim_host=False).freed_bytes.values())
    for _ in range(4):
        same = tensors_and_models()
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
    tensor = torch.ones(4)
    thread = threading.Thread(target=release, args=(Slow(), tensor))
    thread.start()
    begun.wait()
    process = os.fork()
    if process == 0:
        signal.alarm(300)  # For what hangs.
        release(tensor)
        os._exit(tensor.numel())
    assert os.waitpid(process, 0)[1] == 0
    over.set()
    thread.join()
    assert tensor.numel() == 0
    """
    assert_clean(run_forked(program, quick_end=True))


def test_long_close_runs_once_and_delays_no_other_release() -> None:
    def close() -> None:
        closed.append(1)
        begun.set()
        over.wait(TIMEOUT_S)

    begun, over, closed = threading.Event(), threading.Event(), list[int]()
    slow, tensor = types.SimpleNamespace(close=close), torch.ones(4)
    first = threading.Thread(target=release, args=(slow,))
    first.start()
    begun.wait(TIMEOUT_S)
    assert release(tensor).freed_bytes == {"host": 16}
    assert release(slow).errors == ()
    assert first.is_alive(), "the release did not wait for the close()"
    over.set()
    first.join()
    assert closed == [1]


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


BESIDE_A_LOCK = """
import faulthandler, gc, threading, warnings
import torch
from torch_utils import ModelHost, SafePyTorchCleanup, offload, release
warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(300, exit=True)  # For what hangs.
gc.freeze()
gc.set_threshold(100)  # So that one runs in each release.
LOCK = threading.RLock()  # of the program; one thread alone cannot block itself
calls = []

class Session:  # garbage whose destructor needs the lock
    def __init__(self):
        self.me = self
    def __del__(self):
        with LOCK:
            calls.append(1)

def model(layers=1):
    return torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(layers)])
def by_scope(thing):
    with SafePyTorchCleanup(collect="never") as scope:
        scope.manage(thing)

def by_host(thing):
    with ModelHost(lambda: thing) as host:
        host.load()

WAYS = [
    lambda thing: release(thing, collect="never", trim_host=False),
    lambda thing: release({"a": [thing]}, collect="young", trim_host=False),
    by_scope,
    by_host,
    offload,
]

def service():  # holds the lock while it releases
    while not done:
        with LOCK:
            release(model(), collect="never", trim_host=False)

done = False
thread = threading.Thread(target=service)
thread.start()
for way in WAYS:
    calls.clear()
    while len(calls) < 10:
        thing = model(30)
        Session()
        way(thing)
done = True
thread.join()
faulthandler.cancel_dump_traceback_later()
"""


def test_release_waits_for_no_lock_of_the_program() -> None:
    """A collection in the middle of a release runs a destructor, which waits for a lock.

    Another thread holds that lock, and releases something, too.
    """
    assert_clean(run_forked(BESIDE_A_LOCK, quick_end=True))
