"""--explain of both commands, and the programs in its texts."""

import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from clean_exit import FINDINGS, check
from clean_exit.lint import RULES
from clean_exit.lint import check as lint
from tests.support.clean_exit import lint_main, main

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("command", "name", "parts"),
    [
        *(
            (main, name, [f"{name}: {FINDINGS[name]}\n\n", "**What it means.**"])
            for name in FINDINGS
        ),
        *(
            (lint_main, word, [f"{name} ({rule.code})", "**Why.**", "**Safe.**"])
            for name, rule in RULES.items()
            for word in (name, rule.code)
        ),
    ],
)
def test_explain_prints_the_section(
    command: Main, name: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--explain", name]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in parts)
    assert "\n## " not in text


# The other programs take long or need torch.
QUICK = ("import", "partial-init")
HANGS_S = 5  # The timeout of a program that never ends.


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RULES],
)
def test_program_in_a_section_fails_as_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The linter finds the bad program and nothing in the safe one."""
    if name == "device-call" and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    lint_main(["--explain", name])
    text = capsys.readouterr().out
    bad, safe = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    path = tmp_path / f"{name}.py"
    command = [sys.executable, str(path)]
    path.write_text(bad)
    assert name in {finding.rule for finding in lint([str(path)], select=[name]).findings}
    hangs = name == "blocking-call"
    report = check(command, timeout_s=HANGS_S if hangs else None, max_shutdown_s=600)
    assert report.returncode != 0 or not report.clean, str(report)
    assert not hangs or report.findings[0].id == "hang"
    printed = report.stderr + str(report)
    errors = re.findall(r"^(\w+(?:Error|Exit)): (.*)", output, re.MULTILINE)
    assert errors or hangs
    for kind, message in errors:
        # The message about None depends on the version of Python.
        assert kind in printed, printed
        assert "NoneType" in message or message in printed, printed
    path.write_text(safe)
    assert lint([str(path)]).findings == ()
    report = check(command, max_shutdown_s=600)
    assert (report.returncode, report.clean) == (0, True), str(report)
