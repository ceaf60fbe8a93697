"""--explain of both commands, the catalogues in a wheel, and the page of lint findings."""

from __future__ import annotations

import configparser
import contextlib
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.clean_exit import (
    ENTRY_POINTS,
    FINDINGS,
    RULES,
    Finding,
    LintFinding,
    check,
    lint,
    lint_main,
    main,
)
from support.programs import ROOT

HANGS_S = 5  # The timeout of a program that never ends.
Main = Callable[[Sequence[str]], int]


def explain(command: Main, name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command(["--explain", name]) == 0
    return out.getvalue().strip()


@pytest.mark.parametrize("name", FINDINGS)
def test_explain_prints_the_section_of_a_finding(name: str) -> None:
    text = explain(main, name)
    assert text.startswith(f"{name}: {FINDINGS[name]}\n\n")
    assert "**What it means.**" in text
    assert "\n## " not in text
    assert Finding(name, "").help == f"clean-exit --explain {name}"


@pytest.mark.parametrize("name", RULES)
def test_explain_prints_the_section_of_a_rule(name: str) -> None:
    text = explain(lint_main, name)
    assert "**Why.**" in text
    assert "**Safe.**" in text
    assert "\n## " not in text
    assert LintFinding(name, "a.py", 1, 1, "").help == f"clean-exit-lint --explain {name}"


def test_codes_of_rules_are_distinct() -> None:
    assert len({rule.code for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize(
    ("command", "code", "arguments", "names", "other", "printed"),
    [
        (
            main,
            125,
            ["true"],
            FINDINGS,
            "blocking-call",
            "a rule of clean-exit-lint: clean-exit-lint --ex",
        ),
        (lint_main, 2, [], RULES, "hang", "a finding of clean-exit: clean-exit --explain hang"),
    ],
    ids=["clean-exit", "clean-exit-lint"],
)
def test_explain_lists_the_names_or_points_to_the_other_command(
    command: Main,
    code: int,
    arguments: list[str],
    names: Sequence[str],
    other: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither command runs a program."""

    def ask(name: str) -> str:
        try:
            assert command(["--explain", name, *arguments]) == code
        except SystemExit as ended:
            assert ended.code == code
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    assert all(name in ask("what") for name in names)
    assert printed in ask(other)


# The other programs take long or need torch.
QUICK = ("import", "register", "partial-init", "blocking-call", "signature")


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


@pytest.mark.slow
def test_wheel_contains_commands_and_catalogues(tmp_path: Path) -> None:
    """Also a wheel that is built from the sdist."""
    pytest.importorskip("hatchling")

    def build(kind: str, source: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)

    build("wheel", ROOT, tmp_path / "wheel")
    build("sdist", ROOT, tmp_path / "sdist")
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    subprocess.run(["tar", "xzf", str(sdist)], cwd=tmp_path, check=True)
    (source,) = tmp_path.glob("torch_cleanup-*")
    build("wheel", source, tmp_path / "wheel of the sdist")
    questions = [("clean-exit", main, "hang"), ("clean-exit-lint", lint_main, "blocking-call")]
    for folder in (tmp_path / "wheel", tmp_path / "wheel of the sdist"):
        (wheel,) = folder.glob("*.whl")
        installed = folder / "installed"
        zipfile.ZipFile(wheel).extractall(installed)
        entries = configparser.ConfigParser()
        (path,) = installed.glob("*.dist-info/entry_points.txt")
        entries.read(path)
        assert {key: entries[key[0]][key[1]] for key in ENTRY_POINTS} == ENTRY_POINTS
        for name, command, entry in questions:
            module, _, function = ENTRY_POINTS["console_scripts", name].partition(":")
            # -S: without the packages of this Python.
            program = f"import sys; sys.path.insert(0, {str(installed)!r}); "
            program += f"from {module} import {function}; sys.exit({function}())"
            isolated = [sys.executable, "-I", "-S", "-c", program, "--explain", entry]
            done = subprocess.run(isolated, capture_output=True, text=True, check=False)
            assert done.stdout.strip() == explain(command, entry), done.stderr
