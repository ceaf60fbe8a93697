"""Unit tests of the private parser of stderr: it knows all messages and ignores quotations."""

import pytest

from clean_exit.stderr import StderrText

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    1 / 0\n'
ERROR = "ZeroDivisionError: division by zero\n"

# The first lines of messages of Python 3.11 to 3.14, and their findings.
DIALECTS = {
    "Exception ignored in: <function A.__del__ at 0x7f>": "unraisable",
    "Exception ignored in: <finalize object at 0x7f; dead>": "finalizer-error",
    "Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w'>": "unraisable",
    "Exception ignored in sys.unraisablehook: <function hook at 0x7f>": "unraisable",
    "Exception ignored in thread started by: <function f at 0x7f>": "thread-error",
    "Exception ignored in thread started by <function f at 0x7f>:": "thread-error",
    "Exception ignored in atexit callback: <function f at 0x7f>": "atexit-error",
    "Exception ignored in atexit callback <function f at 0x7f>:": "atexit-error",
    "Exception ignored while calling deallocator <function A.__del__ at 0x7f>:": "unraisable",
    "Exception ignored while calling weakref callback <function f at 0x7f>:": "finalizer-error",
    "Exception ignored while closing generator <generator object g at 0x7f>:": "unraisable",
    "Exception ignored on threading shutdown <module 'threading'>:": "unraisable",
    "Exception in thread Thread-1 (f):": "thread-error",
    "Error in atexit._run_exitfuncs:": "atexit-error",
}
TRACKER = "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked "
MEMORY = "shared_memory objects to clean up at shutdown: {'/psm_1'}"
LINES = {
    f"/multiprocessing/{TRACKER}semaphore objects to clean up at shutdown": "leaked-semaphore",
    f"/multiprocessing/{TRACKER}{MEMORY}": "leaked-shared-memory",
    f"/loky/backend/{TRACKER}semlock objects to clean up at shutdown": "leaked-semaphore",
    "sys:1: ResourceWarning: unclosed file <_io.FileIO name=3>": "resource-warning",
    "/a.py:4: RuntimeWarning: coroutine 'f' was never awaited": "resource-warning",
    "nanobind: leaked 2 instances!": "resource-warning",
    "swig/python detected a memory leak of type 'Box *', no destructor found.": "resource-warning",
}


def scan(text: str, chunk: int = 1 << 20) -> StderrText:
    scanner, data = StderrText(), text.encode()
    for start in range(0, len(data), chunk):
        scanner.feed(data[start : start + chunk])
    scanner.close()
    return scanner


def finding_ids(text: str, chunk: int = 1 << 20) -> list[str]:
    return [message.finding.id for message in scan(text, chunk).messages]


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("first", DIALECTS)
def test_message_of_each_python_version_is_recognised(first: str, chunk: int) -> None:
    """In chunks, in colour, with Windows line ends, after a progress bar; not in a quotation."""
    message = f"{first}\n{TRACEBACK}{ERROR}"
    windows = message.replace("\n", "\r\n")
    for text in (
        f"before\n{message}after\n",
        windows,
        f"\x1b[1;35m{first}\x1b[0m\n{TRACEBACK}{ERROR}".rstrip(),
        f"{first}\n{ERROR}",  # Without a traceback.
        f" 10%\r 50%\r{message}after\n",
        f" 10%\r 50%\r{windows}after\n",
        "".join(f"[default0]: {line}\n" for line in message.splitlines()),
        "".join(f"[default0]:{line}\n" for line in message.splitlines()),
    ):
        assert finding_ids(text, chunk) == [DIALECTS[first]], text
    quotations = (f"the manual says: \r {message}", f"the manual says: {message}", f"  {message}")
    for text in (*quotations, f"{first}\nand then it went on\n"):
        assert finding_ids(text, chunk) == [], text


CLOSING = "an error occurred during closing of asynchronous generator <async_generator object g>"
ASYNCIO = {
    "Task was destroyed but it is pending!": "task: <Task pending name='Task-2'>\n",
    "Task exception was never retrieved": f"future: <Task finished>\n{TRACEBACK}{ERROR}",
    "unhandled exception during asyncio.run() shutdown": f"task: <Task>\n{TRACEBACK}{ERROR}",
    CLOSING: f"asyncgen: <async_generator object g at 0x7f>\n{TRACEBACK}{ERROR}",
}


@pytest.mark.parametrize("first", ASYNCIO)
def test_asyncio_message_needs_the_line_about_its_object(first: str) -> None:
    for before in ("", "ERROR:asyncio:", "2026-01-01 ERROR asyncio "):
        assert finding_ids(f"{before}{first}\n{ASYNCIO[first]}") == ["unraisable"]
        assert finding_ids(f"{before}{first}\n{TRACEBACK}{ERROR}") == []


@pytest.mark.parametrize("line", LINES)
def test_single_line_message_is_recognised_only_at_the_start_of_a_line(line: str) -> None:
    assert finding_ids(line + "\n") == [LINES[line]]
    assert finding_ids(f"the manual says: {line}\n".replace(".py:", ".py ").replace("]", ")")) in (
        [],
        ["resource-warning"],  # Any text may come before this message.
    )


def test_bare_traceback_is_recognised_by_its_first_frame() -> None:
    frames = '  File "/usr/lib/python3.12/weakref.py", line 666, in _exitfunc\n    f()\n'
    head, rest = TRACEBACK.split("\n", 1)
    assert finding_ids(f"{head}\n{frames}{rest}{ERROR}") == ["finalizer-error"]
    assert finding_ids(TRACEBACK + ERROR) == []


CRASHES = [
    "Segmentation fault",
    "Aborted (core dumped)",
    "bash: line 1:  1790 Segmentation fault      python3 seg.py",
    "terminate called after throwing an instance of 'std::runtime_error'",
    "free(): invalid pointer",
    "a.out: a.c:3: main: Assertion `x > 0' failed.",
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):",
    "Fatal Python error: init_fs_encoding: failed\nPython runtime state: core initialized",
]


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("words", CRASHES)
def test_crash_message_is_recognised_only_at_the_start_of_a_line(words: str, chunk: int) -> None:
    prefixed = words.replace("\n", "\n[default0]:")
    for text, expected in ((words, 1), (prefixed, 1), (f"the manual says: {words}", 0)):
        assert len(scan(f"before\n{text}\n", chunk).crashes) == expected, text
