"""Tests of CleanupReport as a string."""

import pytest

from tests.support.programs import run
from torch_utils import CleanupReport, HostMemory, MemorySnapshot, StillHeld


def test_bytes_have_decimal_units() -> None:
    texts = {999: "999 B", 1000: "1.0 kB", 90_900_000: "90.9 MB", -2_000_000_000: "-2.0 GB"}
    for count, text in texts.items():
        report = CleanupReport(freed_bytes={"host": count})
        assert str(report).startswith(f"freed {text} on host in ")


def test_str_of_report_has_all_parts() -> None:
    held = (StillHeld("a.weight", 3000, "host", ("a numpy view",)), StillHeld("b", 1, "host"))
    report = CleanupReport(
        freed_bytes={"host": 5_000_000, "cuda:0": 7_000_000},
        still_held=held,
        errors=(ValueError("x"), KeyError("y")),
        duration_s=0.0123,
        before=MemorySnapshot(HostMemory(10_000_000, 6_000_000, 4_000_000)),
        after=MemorySnapshot(HostMemory(4_000_000, 1_000_000, 3_000_000)),
    )
    assert str(report) == (
        "freed 5.0 MB on host, 7.0 MB on cuda:0 in 12.3 ms; "
        "resident 10.0 MB -> 4.0 MB (anonymous 6.0 MB -> 1.0 MB); "
        "still held: 3.0 kB: a.weight (3.0 kB on host), held by a numpy view and 1 more; "
        "once it is free, release() without arguments returns its memory; "
        "2 errors, the first: ValueError('x')"
    )
    assert report.returned_bytes == {"host": 6_000_000}
    assert report.still_held_bytes == 3001
    with pytest.raises(AttributeError):
        report.duration_s = 1.0  # type: ignore[misc]


def test_str_of_report_at_exit_names_closers_and_errors() -> None:
    program = """
    import atexit
    class Failing:
        def close(self):
            print("closed")
            raise ValueError("from close")
    atexit.register(lambda: print(release(Failing())))
    from torch_utils import release  # Its own exit callback runs first.
    """
    result = run(program)
    assert result.stdout == (
        "closed\nonly closed, nothing counted: the program is ending, and the system takes the "
        "memory back; 1 error, the first: ValueError('from close')\n"
    ), str(result)
