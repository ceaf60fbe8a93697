"""Frames are read without `f_locals`, on every Python that is found."""

from __future__ import annotations

import sys

import pytest

from hazards.pythons import other_pythons
from programs import assert_clean, run

PROGRAM = """
import ctypes, sys, threading
from torch_utils._frames import has_ended, variables_of

def main(argument, *rest, shared=2, **options):
    mine, later = [argument], None
    def inner():
        return variables_of(sys._getframe()), shared, mine
    del later
    seen = locals()
    number = 5
    found = dict(variables_of(sys._getframe()))
    assert "number" not in seen, "the program's dictionary was written into"
    del found["inner"], found["seen"]
    assert found == {"argument": 1, "rest": (2,), "options": {"x": 3}, "shared": 2,
                     "mine": [1], "number": 5}, found
    assert dict(inner()[0]) == {"shared": 2, "mine": [1]}
main(1, 2, x=3)

# Of other threads, which call and return all the while.
sys.setswitchinterval(1e-5)
stop = []
def leaf(depth):
    word, cell = f"leaf {depth}", depth
    def closure():
        return cell
    return leaf(depth - 1) if depth else closure
def work():
    while not stop:
        leaf(20)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(2000):
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is leaf.__code__:
                found = dict(variables_of(frame))
                assert found.get("word", "leaf ").startswith("leaf ")
                assert type(found.get("depth", 1)) is int
            frame = frame.f_back
stop.append(True)
for thread in threads:
    thread.join()

def numbers():
    yield sys._getframe()
generator = numbers()
frame = next(generator)
if sys.version_info < (3, 13):
    assert not has_ended(frame)
assert list(generator) == [] and has_ended(frame)
"""


@pytest.mark.parametrize(
    "version",
    ["this", *(pytest.param(f"3.{n}", marks=pytest.mark.slow) for n in range(10, 14))],
)
def test_reading(version: str) -> None:
    """All variables that have a value, of this thread and of others, and no side effect."""
    python = sys.executable if version == "this" else other_pythons().get(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed, or is this one")
    assert_clean(run(PROGRAM, python=python))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is a proxy from 3.13 on")
def test_f_locals_writes_into_the_programs_dictionary() -> None:
    """Negative control: the ordinary way is noticed by the same program."""
    unsafe = PROGRAM.replace(
        "from torch_utils._frames import has_ended, variables_of",
        "from torch_utils._frames import has_ended\n"
        "def variables_of(frame): return list(frame.f_locals.items())",
    )
    assert "the program's dictionary was written into" in run(unsafe).stderr
