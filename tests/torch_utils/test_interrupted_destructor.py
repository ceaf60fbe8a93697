"""A Ctrl-C that comes into a destructor is not lost."""

from __future__ import annotations

import pytest

from programs import assert_clean, run

PROGRAM = """
import signal
from torch_utils import Resource

released = []
class Safe(Resource):
    def __init__(self): pass
    def _release(self):
        COME
        released.append(self)
class Naive:
    def __del__(self):
        COME
kept = SUBJECT()
try:
    del kept
    for _ in range(10_000):
        pass
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
CTRL_C = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize("handler", ["", "import threading\n"])
def test_it_comes_again(handler: str) -> None:
    """To the code that has dropped the resource; nothing is printed."""
    result = run(handler + PROGRAM.replace("SUBJECT", "Safe").replace("COME", CTRL_C))
    assert_clean(result)
    assert result.stdout == "interrupted\n"


def test_control_of_a_naive_one() -> None:
    """Python prints it, and the program runs on."""
    result = run(PROGRAM.replace("SUBJECT", "Naive").replace("COME", CTRL_C))
    assert result.stdout == "went on\n"
    assert "Exception ignored" in result.stderr


def test_what_the_release_itself_raises_is_only_logged() -> None:
    """That is an error of it, and no Ctrl-C; nor is one that the program has ignored."""
    result = run(PROGRAM.replace("SUBJECT", "Safe").replace("COME", "raise KeyboardInterrupt"))
    assert_clean(result)
    assert result.stdout == "went on\n"
