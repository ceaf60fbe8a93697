"""--explain of both commands, and the programs in its texts."""

import contextlib
import io
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

HANGS_S = 5  # The timeout of a program that never ends.
Main = Callable[[Sequence[str]], int]


def explain(command: Main, name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command(["--explain", name]) == 0
    return out.getvalue().strip()


@pytest.mark.parametrize(
    ("command", "name", "parts"),
    [
        *(
            (main, name, [f"{name}: {FINDINGS[name]}\n\n", "**What it means.**"])
            for name in FINDINGS
        ),
        *((lint_main, name, ["**Why.**", "**Safe.**"]) for name in RULES),
        *((lint_main, rule.code, [f"{name} ({rule.code})"]) for name, rule in RULES.items()),
    ],
)
def test_explain_prints_the_section(command: Main, name: str, parts: list[str]) -> None:
    text = explain(command, name)
    assert all(part in text for part in parts)
    assert "\n## " not in text


@pytest.mark.parametrize(
    ("command", "code", "names"), [(main, 125, FINDINGS), (lint_main, 2, RULES)]
)
def test_explain_of_an_unknown_name_lists_the_names(
    command: Main, code: int, names: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert command(["--explain", "what", "."]) == code
    except SystemExit as ended:
        assert ended.code == code
    output = capsys.readouterr()
    assert output.out == ""
    assert all(name in output.err for name in names)


# The other programs take long or need torch.
QUICK = ("import", "partial-init", "blocking-call")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RULES],
)
def test_program_in_a_section_fails_as_printed(name: str, tmp_path: Path) -> None:
    """The linter finds the bad program and nothing in the safe one."""
    if name == "device-call" and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    text = explain(lint_main, name)
    bad, safe = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    path = tmp_path / f"{name}.py"

    def rules() -> set[str]:
        return {finding.rule for finding in lint([str(path)], select=[name]).findings}

    path.write_text(bad)
    assert name in rules()
    hangs = name == "blocking-call"
    command = [sys.executable, str(path)]
    report = check(command, timeout_s=HANGS_S if hangs else None, max_shutdown_s=600)
    assert report.returncode != 0 or not report.clean, str(report)
    printed = report.stderr + str(report)
    errors = re.findall(r"^(\w+(?:Error|Exit)): (.*)", output, re.MULTILINE)
    assert errors or hangs
    for kind, message in errors:
        # The message about None depends on the version of Python.
        assert kind in printed, printed
        assert "NoneType" in message or message in printed, printed
    assert not hangs or report.findings[0].id == "hang"
    path.write_text(safe)
    assert lint([str(path)]).findings == ()
    report = check(command, max_shutdown_s=600)
    assert (report.returncode, report.clean) == (0, True), str(report)
