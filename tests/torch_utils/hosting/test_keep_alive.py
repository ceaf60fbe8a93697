"""How long an idle model is kept, in the words that are understood."""

from __future__ import annotations

import pytest

from torch_utils import ModelHost
from torch_utils.hosting.keep_alive import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0), (300, 300), (0.5, 0.5), (-1, None), (-1.0, None), ("0", 0), ("-1", None),
        ("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), ("1.5m", 90), ("250ms", 0.25),
        (" 10m ", 600),
    ],
)  # fmt: skip
def test_understood(value, seconds) -> None:
    """Numbers are seconds; texts have a unit."""
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("", ValueError), ("soon", ValueError), ("10", ValueError), ("10 m", ValueError),
        ("-5m", ValueError), ("5d", ValueError), ("m", ValueError), (-2, ValueError),
        (float("nan"), ValueError), (float("inf"), ValueError), (None, TypeError),
        (True, TypeError), ([], TypeError), (b"5m", TypeError),
    ],
)  # fmt: skip
def test_refused(value, error) -> None:
    """With the value, and what can be said instead; by the host, before anything is loaded."""
    with pytest.raises(error, match="90s") as caught:
        ModelHost(int, keep_alive=value)
    assert repr(value) in str(caught.value)
