"""Tests that leave nothing behind: the marker and the setting ``leaves_nothing`` of pytest.

A thread, a task of asyncio or a child process belongs to the test whose code, or whose fixtures of
scope "function", have started it. What another thread, task or executor starts belongs to the test
of that one. So what fixtures of a wider scope start belongs to no test, also while a test uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import ProcessPoolExecutor
from concurrent.futures.thread import ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from clean_exit.options import compile_pattern
from clean_exit.processes import HELPERS, children, read_process

_GRACE_S = 2.0  # for what is about to end
_SOON_S = 0.2  # for most of it; a collection takes longer in a large program
# Threads that end with the event loop, the queue or the program that has them, not with a test.
_POOLED = re.compile(
    r"asyncio_\d|AnyIO worker thread|Trio thread|QueueFeederThread|Thread-\d+ \(_serve\)"
)
_CLOCK = time.monotonic, time.sleep  # Here, because tests replace those of the module.
_DESTROYED = "Task was destroyed but it is pending!"
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_HERE = os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118
_ADVICE = "end it in the test, or in the teardown of the fixture that starts it"


class _Test:
    """What one test has started and where: the file, the line and the function.

    Nothing of it is kept alive: a program may wait for the end of an object.
    """

    def __init__(self) -> None:
        self.threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        self.tasks: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        self.lost: dict[int, str] = {}  # Where a task was made; by its id, while it is destroyed.
        self.destroyed: list[str] = []
        self.processes: dict[int, str] = {}
        self.others: set[int] = set(children())
        self.is_passed = False

    def note_error(self, context: dict[str, Any]) -> None:
        """Note a task that the loop reports because it was destroyed while it was pending."""
        task = context.get("task")
        if context.get("message") == _DESTROYED and id(task) in self.lost:
            self.destroyed.append(_describe(task, self.lost[id(task)]))

    def left(self) -> list[str]:
        """Describe what is still alive, and tasks that never will be done."""
        found = []
        for thread, place in list(self.threads.items()):
            if thread.is_alive() and not _POOLED.match(thread.name):
                found.append(f"thread {thread.name!r}, started in {place}")
        found += [_describe(task, at) for task, at in list(self.tasks.items()) if not task.done()]
        for pid in children():
            process = None if pid in self.others else read_process(pid)
            is_alive = process is not None and process.state not in "ZX"
            if is_alive and not any(helper in str(process) for helper in HELPERS):
                place = self.processes.get(pid, "an unknown place")
                found.append(f"process {process}, started in {place}")
        # Last: a garbage collection may have destroyed a task since the start of this.
        return list(dict.fromkeys([*found, *self.destroyed]))


def _describe(task: Any, place: str) -> str:
    return f"task {task.get_name()!r} of {task.get_coro().__qualname__}(), created in {place}"


_test: ContextVar[_Test | None] = ContextVar("clean_exit_test", default=None)


class LeavesNothing:
    """The plugin: follows what tests start, and fails those that leave something behind.

    Args:
        has_all: Whether all tests are checked, or only the marked ones.
        ignored: Regular expressions. What matches one may stay.
    """

    def __init__(self, *, has_all: bool, ignored: Sequence[str]) -> None:
        self._has_all, self._ignored = has_all, [compile_pattern(one) for one in ignored]
        self._outer = _test.get()  # of a session in this process that runs this one in a test
        self._owners: WeakKeyDictionary[Any, _Test | None] = WeakKeyDictionary()
        self._replaced: list[tuple[type, str, Any, Any]] = []
        self._replace(ThreadPoolExecutor, "__init__", lambda *_: None)
        self._replace(ProcessPoolExecutor, "__init__", lambda *_: None)
        self._replace(threading.Thread, "start", self._note_thread)
        self._replace(BaseProcess, "start", self._note_process)
        self._replace(Popen, "__init__", self._note_process)
        self._replace(asyncio.BaseEventLoop, "create_task", self._note_task)
        self._replace(asyncio.BaseEventLoop, "call_exception_handler", self._note_error)

    def _replace(self, cls: type, name: str, note: Callable[..., None]) -> None:
        """Call a function after a method: with the test it is for, the object and the result."""
        usual = getattr(cls, name)

        @functools.wraps(usual)
        def method(thing: Any, /, *args: Any, **options: Any) -> Any:
            test = None
            with contextlib.suppress(Exception):  # The program must not see an error of this.
                test = self._owner()
                if cls in (threading.Thread, ThreadPoolExecutor, ProcessPoolExecutor):
                    self._owners[thing] = test  # Before it starts something itself.
            result = usual(thing, *args, **options)
            with contextlib.suppress(Exception):
                note(test, thing, result, *args)
            return result

        setattr(cls, name, method)
        self._replaced.append((cls, name, method, usual))

    def pytest_unconfigure(self) -> None:
        """Take the methods back."""
        for cls, name, method, usual in reversed(self._replaced):
            if cls.__dict__.get(name) is method:
                setattr(cls, name, usual)

    def _owner(self) -> _Test | None:
        """Return the test that the present code runs for."""
        frame = sys._getframe(2)
        for _ in range(4):  # An executor starts threads and processes when it needs them.
            if frame is None or not frame.f_globals.get("__name__", "").startswith("concurrent."):
                break
            executor = frame.f_locals.get("self")
            if isinstance(executor, (ThreadPoolExecutor, ProcessPoolExecutor)):
                return self._owners.get(executor)
            frame = frame.f_back  # type: ignore[assignment]
        if asyncio._get_running_loop() is not None:
            task = asyncio.current_task()
            if task in self._owners:
                return self._owners[task]
        return _test.get() or self._owners.get(threading.current_thread())

    def _note_thread(self, test: _Test | None, thread: threading.Thread, _result: None) -> None:
        if test is not None:
            test.threads[thread] = _place()

    def _note_process(self, test: _Test | None, process: Any, _result: None, *_: Any) -> None:
        if test is not None and process.pid is not None:
            test.processes[process.pid] = _place()
        elif (current := self._current) is not None and process.pid is not None:
            current.others.add(process.pid)

    def _note_task(self, test: _Test | None, _loop: Any, task: Any, *_: Any) -> None:
        self._owners[task] = test
        # asyncio itself closes generators that were dropped; those coroutines have no name.
        if test is not None and hasattr(task.get_coro(), "__qualname__"):
            test.tasks[task] = test.lost[id(task)] = _place()

    def _note_error(self, _test: Any, _loop: Any, _result: None, context: dict[str, Any]) -> None:
        if self._current is not None:
            self._current.note_error(context)

    # The hooks, in the order of a test

    _current: _Test | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to follow what a test starts."""
        is_checked = self._has_all or item.get_closest_marker("leaves_nothing")
        self._current = _Test() if is_checked else None
        _test.set(self._current or self._outer)
        usual = item.setup

        def setup() -> None:
            # The first finalizer runs last: after the test's own fixtures, before wider ones.
            item.addfinalizer(lambda: self._check(item))
            item.setup = usual  # type: ignore[method-assign]
            usual()

        if is_checked:
            item.setup = setup  # type: ignore[method-assign]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Leave out what a fixture of a wider scope starts."""
        if self._current is None or fixturedef.scope == "function":
            yield
            return
        token = _test.set(None)
        yield
        _test.reset(token)
        self._current.others |= set(children()) - self._current.processes.keys()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note that the test has passed: a traceback of a failed one keeps much alive."""
        if self._current is not None:  # pytest keeps the errors of unittest's test cases.
            self._current.is_passed = not getattr(item, "_excinfo", None)

    def _check(self, item: pytest.Item) -> None:
        """Fail the test if something is left."""
        test = self._current
        _test.set(self._outer)
        try:
            if test is not None and test.is_passed:
                self._wait(test, item)
        finally:
            self._current = None

    def _wait(self, test: _Test, item: pytest.Item) -> None:
        ignored = list(self._ignored)
        for marker in item.iter_markers("leaves_nothing"):
            ignored += _patterns(marker)
        now, sleep = _CLOCK
        stop, is_collected = now() + _GRACE_S, False
        while left := [one for one in test.left() if not any(p.search(one) for p in ignored)]:
            if now() > stop:
                lines = "".join(f"\n  {one}" for one in left)
                pytest.fail(f"the test leaves this behind:{lines}\n{_ADVICE}", pytrace=False)
            if not is_collected and now() > stop - _GRACE_S + _SOON_S:
                gc.collect()  # A dropped executor ends its threads.
                is_collected = True
            sleep(0.02)


def _patterns(marker: pytest.Mark) -> list[Any]:
    given = marker.kwargs.get("ignore", ())
    if marker.args or marker.kwargs.keys() - {"ignore"}:
        pytest.fail("the marker leaves_nothing takes ignore= only", pytrace=False)
    try:
        return [compile_pattern(one) for one in ([given] if isinstance(given, str) else given)]
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"the marker leaves_nothing: {error}", pytrace=False) from None


def _place() -> str:
    """Return the innermost line outside of Python's and installed packages, or the innermost."""
    frame, chosen = sys._getframe(3), None
    while frame is not None and chosen is None:
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
            chosen = frame
        frame = frame.f_back  # type: ignore[assignment]
    chosen = chosen or sys._getframe(3)
    path = chosen.f_code.co_filename.removeprefix(_HERE)
    return f"{path}:{chosen.f_lineno} in {chosen.f_code.co_name}()"
