"""The catalogue of rules: both programs of each entry do what it says, and pip installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from programs import ROOT
from torch_utils.clean_exit import check as run_program
from torch_utils.clean_exit.catalogue import explain as explain_finding
from torch_utils.clean_exit_lint import RULES, Finding, check
from torch_utils.clean_exit_lint.catalogue import explain

EXPLAIN = [sys.executable, "-m", "torch_utils.clean_exit_lint", "--explain"]
SLOW_S = 600  # How long an end may take: it is not what is tested here.
HANGS_S = 5  # How long a program that never ends is given; a slow machine changes nothing.


def blocks(name: str) -> tuple[str, str, str]:
    """Return the bad program of an entry, what it printed, and the safe one."""
    text = explain(name)
    bad, safe = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    return bad, output, safe


def rules_in(path: Path) -> set[str]:
    return {finding.rule for finding in check([str(path)]).findings}


FAST = ("import", "register", "half-built", "wait")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RULES]
)
def test_entry(name: str, tmp_path: Path) -> None:
    """The bad program is found and fails as printed; in the safe one nothing is found."""
    if name == "device" and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    bad, output, safe = blocks(name)
    path = tmp_path / f"{name}.py"
    path.write_text(bad)
    assert name in rules_in(path)
    hangs = name == "wait"
    report = run_program(
        [sys.executable, str(path)], timeout_s=HANGS_S if hangs else None, max_shutdown_s=SLOW_S
    )
    assert report.returncode != 0 or not report.clean, str(report)
    said = report.stderr + str(report)
    for line in output.splitlines():
        if re.match(r"\w+(Error|Exit): ", line):
            kind, _, text = line.partition(": ")
            # Other Pythons have other words for None: the kind of error is the same.
            assert kind in said, said
            assert "NoneType" in text or text in said, said
    assert not hangs or report.findings[0].id == "hang"
    path.write_text(safe)
    assert rules_in(path) == set()
    report = run_program([sys.executable, str(path)], max_shutdown_s=SLOW_S)
    assert (report.returncode, report.clean) == (0, True), str(report)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_explained(name: str) -> None:
    """By its id and its code; findings say how to get there."""
    text = explain(name)
    assert text == explain(RULES[name].code)
    assert "**Why.**" in text
    assert "**Safe.**" in text
    assert "\n## " not in text
    assert Finding(name, "a.py", 1, 1, "").help == f"clean-exit-lint --explain {name}"


def test_command() -> None:
    """It prints the entry; an unknown rule gets those that there are."""
    done = subprocess.run([*EXPLAIN, "wait"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, explain("wait"), "")
    done = subprocess.run([*EXPLAIN, "weight"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(name in done.stderr for name in RULES)


@pytest.mark.slow
def test_wheel_has_the_catalogue(tmp_path: Path) -> None:
    """Without the checkout an entry is found, by the name that the command starts with."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (entries,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "clean-exit-lint = _torch_cleanup.clean_exit_lint.cli:main" in entries.read_text()
    program = "import sys; from _torch_cleanup.clean_exit_lint.cli import main; sys.exit(main())"
    # -S: not what this Python has installed.
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); {program}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", path, "--explain", "wait"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == explain("wait"), done.stderr


def test_names_its_own_relatively() -> None:
    """Or flake8 could not load it beside a project's own torch_utils; a full name is found."""
    files = list((ROOT / "torch_utils" / "clean_exit_lint").rglob("*.py"))
    assert len(files) > 30
    absolute = [
        (path.name, line)
        for path in files
        for line in path.read_text().splitlines()
        if line.startswith(("from torch_utils", "import torch_utils"))
    ]
    assert absolute == []


def test_each_command_points_to_the_other() -> None:
    """Where a finding of the one is asked of the other; a name of neither is said to be none."""
    with pytest.raises(ValueError, match="a finding of clean-exit: clean-exit --explain hang"):
        explain("hang")
    with pytest.raises(ValueError, match="a rule of clean-exit-lint: clean-exit-lint --explain wa"):
        explain_finding("wait")
    for explaining in (explain, explain_finding):
        with pytest.raises(ValueError, match=r"there is no \w+ 'what'; there are"):
            explaining("what")
