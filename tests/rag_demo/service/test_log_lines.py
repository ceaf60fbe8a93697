"""The log: whoever does not read it holds nobody up, and whoever does gets all of it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_program import service

from programs import run
from rag_demo.service import log_lines
from torch_utils._releasing import in_use
from watching import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes are others there")


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that takes nothing more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"." * 512)
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_nobody_reads(index: Path, full_pipe: tuple[int, int]) -> None:
    """Requests are answered, and the service stops."""
    environment = {**os.environ, "LEVEL": "INFO"}
    with service(index, stderr=full_pipe[1], env=environment) as served:
        for _ in range(3):
            assert served.search("lease")[0] == 200
        assert served.stop() == 143


def test_what_is_dropped_is_counted(full_pipe: tuple[int, int]) -> None:
    """Lines wait while nobody reads, up to a bound; then the log goes on, and says how many."""
    reader, writer = full_pipe
    handler = log_lines._Lines(writer)
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    logger = logging.getLogger("rag_demo.service")
    logger.addHandler(handler)
    said = b""
    try:
        count = log_lines._MOST_LINES + 100
        for number in range(count):
            logger.warning("%d", number)
        while f"<{log_lines._MOST_LINES - 1}>\n".encode() not in said:
            said += os.read(reader, 1 << 16)
        logger.warning("again")
        while b"<again>\n" not in said:
            said += os.read(reader, 1 << 16)
    finally:
        logger.removeHandler(handler)
    lines = [line for line in said.decode().strip(".").splitlines() if line]
    written = sum(line.strip("<>").isdigit() for line in lines)
    assert lines[-2:] == [
        f"<{count - written} lines of the log were dropped: nobody read them>",
        "<again>",
    ]
    assert log_lines._MOST_LINES <= written <= log_lines._MOST_LINES + 1


PROGRAM = """
    import logging, os
    from rag_demo.service.log_lines import configure_logging

    configure_logging("text", "INFO")
    log = logging.getLogger("rag_demo")
    child = os.fork()
    for number in range(1000):
        log.info("%s %d.", "parent" if child else "child", number)
    if child:
        os.waitpid(child, 0)
    else:
        os._exit(0)
"""


def test_all_is_written_at_the_end() -> None:
    """What was logged last too, and in a fork, which has no thread for it."""
    result = run(PROGRAM)
    assert result.returncode == 0, str(result)
    for who in ("parent", "child"):
        assert result.stderr.count(f"] {who} ") == 1000, who


def test_its_thread_is_none_at_work(full_pipe: tuple[int, int]) -> None:
    """A release keeps no tensor for it, as it would for one that may be computing."""
    before = set(threading.enumerate())
    log_lines._Lines(full_pipe[1])
    (thread,) = set(threading.enumerate()) - before
    wait_for(lambda: thread.ident not in in_use._places_of_others())
