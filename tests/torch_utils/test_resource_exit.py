"""Resource at the end of a program: every program here must leave cleanly."""

from __future__ import annotations

import pytest

from programs import assert_clean, run

EXIT = """
import atexit
from torch_utils import Resource, is_shutting_down

class R(Resource):
    def __init__(self, n):
        self.n = n
    def _release(self):
        import json  # Every module is intact.
        print(self.n, is_shutting_down(), json.dumps(1), flush=True)
"""


def test_exit_closes_newest_first() -> None:
    """In reverse order of creation, after the user's own atexit callbacks."""
    result = run(
        EXIT
        + """
a, b, c = R(1), R(2), R(3)
b.close()
atexit.register(lambda: print("open" if not a.closed else "closed", is_shutting_down()))
"""
    )
    assert_clean(result)
    assert result.stdout == "2 False 1\nopen False\n3 True 1\n1 True 1\n"


def test_exit_survives_every_error() -> None:
    """ValueError, SystemExit and KeyboardInterrupt skip nobody, and change no exit code."""
    result = run(
        EXIT
        + """
class Bad(R):
    def _release(self):
        super()._release()
        raise self.n
kept = [R(0), Bad(ValueError()), R(1), Bad(SystemExit('no')), R(2), Bad(KeyboardInterrupt()), R(3)]
"""
    )
    assert_clean(result)
    numbers = [line.split()[0] for line in result.stdout.splitlines() if line[0].isdigit()]
    assert numbers == ["3", "2", "1", "0"]
    assert result.stdout.count("True") == 7


@pytest.mark.parametrize("collector", ["gc.enable()", "gc.disable()"])
def test_created_in_a_late_atexit_callback(collector: str) -> None:
    """A resource made when this library's callback has already run is released as well."""
    result = run(
        f"""
import atexit, gc
{collector}
kept = []
atexit.register(lambda: (kept.append(R(7)), gc.collect()))
"""
        + EXIT
    )
    assert_clean(result)
    assert result.stdout == "7 True 1\n"


def test_opting_out_of_exit() -> None:
    """close_at_exit = False leaves it to the program."""
    result = run(EXIT + "class D(R):\n    close_at_exit = False\nd = D(1)\nr = R(2)\n")
    assert_clean(result)
    assert result.stdout == "2 True 1\n"


def test_daemon_thread_ends_quietly() -> None:
    """A daemon thread that still uses a resource at exit ends without a traceback."""
    result = run(
        EXIT
        + """
import threading, time
r = R(1)
def use():
    while True:
        r.ensure_open()
        time.sleep(0.0001)
threading.Thread(target=use, daemon=True).start()
atexit.register(time.sleep, 0.05)
"""
    )
    assert_clean(result)
    assert result.stdout == "1 True 1\n"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing_child_closes_its_own(method: str) -> None:
    """A child closes what it opened, never its parent's, on every start method."""
    result = run(
        EXIT
        + f"""
import multiprocessing, os
def work():
    global child
    child = R("child")
if __name__ == "__main__":
    parent = R("parent")
    context = multiprocessing.get_context("{method}")
    process = context.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
""",
        as_file=True,
    )
    assert_clean(result)
    assert sorted(result.stdout.split("\n")) == ["", "child True 1", "parent True 1"]


def test_releases_that_open_others_come_to_an_end() -> None:
    """Each release opens the next: most are closed, the end says so once, and the program ends."""
    result = run(
        EXIT
        + """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
kept = []
class Next(Resource):
    count = 0
    def _release(self):
        Next.count += 1
        kept.append(Next())
kept.append(Next())
import torch_utils._registry as registry
class Last(Resource):
    def _release(self): print("last", flush=True)
first = Last()
atexit.register(print, "atexit", flush=True)
"""
    )
    assert_clean(result)
    assert result.stdout.startswith("atexit\nlast\nmore than 1000 were opened")
    assert result.stdout.count("\n") == 3


def test_what_a_release_opens_is_closed() -> None:
    """A few that are opened while everything is closed are closed as well."""
    result = run(
        EXIT
        + """
class Opens(R):
    def _release(self):
        super()._release()
        if self.n: kept.append(Opens(self.n - 1))
kept = [Opens(3)]
"""
    )
    assert_clean(result)
    assert result.stdout == "3 True 1\n2 True 1\n1 True 1\n0 True 1\n"
