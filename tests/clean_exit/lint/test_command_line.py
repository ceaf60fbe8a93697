"""The command clean-exit-lint: exit codes, formats, settings, ignores, the baseline, streams."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from clean_exit.lint import RULES
from tests.support.clean_exit import ENVIRONMENT, exit_code, lint_main, run_command
from tests.support.programs import ROOT

DIRTY = """class A:
    def __del__(self):
        self.close()

    def close(self):
        import os
"""
COMMAND = [sys.executable, "-m", "clean_exit.lint"]
Output = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a dirty and a clean file, which is the current one, and has no settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dirty.py").write_text(DIRTY)
    (tmp_path / "clean.py").write_text("x = 1\n")
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


@pytest.fixture
def output(folder: Path, capsys: pytest.CaptureFixture[str]) -> Output:
    """Run the command in this process, and return its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(lint_main, arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_command([*COMMAND, *arguments], **options)


def test_exit_codes_and_text_format(folder: Path, output: Output) -> None:
    """Nothing of the code is run or imported."""
    (folder / "raises.py").write_text("raise SystemExit(8)\n")
    assert output("clean.py") == (0, "clean-exit-lint: nothing found in 1 file\n", "")
    done = run(".")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        "dirty.py:6:9: import: __del__ -> close: import os\n"
        "  | import os\n"
        "  see clean-exit-lint --explain import\n"
        "\n"
        "clean-exit-lint: 1 finding in 3 files: 1 import\n"
    )
    assert output() == (1, done.stdout, "")  # The default is the current folder.


def test_json_format_has_the_documented_schema(output: Output) -> None:
    finding = {
        "rule": "import",
        "path": "dirty.py",
        "line": 6,
        "column": 9,
        "message": "__del__ -> close: import os",
        "trace": ["__del__", "close"],
        "help": "clean-exit-lint --explain import",
    }
    for path, code, findings in ((".", 1, [finding]), ("clean.py", 0, [])):
        done = output("--format", "json", path)
        assert (done[0], json.loads(done[1])) == (code, {"schema_version": 1, "findings": findings})


def test_sarif_has_the_fields_of_the_standard(folder: Path, output: Output) -> None:
    (folder / "dirty.py").rename("dirty 2.py")
    code, printed, _ = output("--format", "sarif", ".")
    (run_,) = json.loads(printed)["runs"]
    rules = run_["tool"]["driver"]["rules"]
    assert (code, [rule["id"] for rule in rules]) == (1, [*RULES])
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)
    assert run_["columnKind"] == "unicodeCodePoints"
    place = {
        "artifactLocation": {"uri": "dirty%202.py"},
        "region": {"startLine": 6, "startColumn": 9},
    }
    result = {
        "ruleId": "import",
        "level": "warning",
        "message": {"text": "__del__ -> close: import os"},
        "locations": [{"physicalLocation": place}],
    }
    assert run_["results"] == [result]


def test_github_format_escapes_paths(folder: Path, output: Output) -> None:
    (folder / "a,b:c.py").write_text(DIRTY)
    code, printed, _ = output("--format", "github", "a,b:c.py")
    assert (code, printed.count("\n")) == (1, 1)
    assert printed.startswith("::error file=a%2Cb%3Ac.py,line=6,col=9,title=")
    assert printed.endswith("import os (see clean-exit-lint --explain import)\n")


def test_select_and_ignore_take_ids(folder: Path, output: Output) -> None:
    (folder / "dirty.py").write_text(DIRTY + "        os.wait()\n        os.x.create_task()\n")

    def rules(*arguments: str) -> set[str]:
        printed = json.loads(output("--format", "json", *arguments, ".")[1])
        return {finding["rule"] for finding in printed["findings"]}

    assert rules() == rules("--select", "all") == {"import", "blocking-call", "async"}
    assert rules("--select", "import", "--select", "async") == {"import", "async"}
    assert rules("--select", "import,async", "--ignore", "async") == {"import"}
    code, printed, _ = output("--exit-zero", ".")
    assert code == 0
    assert printed.endswith("3 findings in 2 files: 1 async, 1 blocking-call, 1 import\n")


def test_rules_are_left_out_in_some_files(folder: Path, output: Output) -> None:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_dirty.py").write_text(DIRTY)
    arguments = ["--per-file-ignores", "dirty.py:import,async"]
    assert output(*arguments, ".")[0] == 1
    assert output(*arguments, "--per-file-ignores", "tests/*:import", ".")[0] == 0
    table = '[tool.clean-exit-lint.per-file-ignores]\n"dirty.py" = ["import"]\n'
    (folder / "pyproject.toml").write_text(f'{table}"tests/*" = ["all"]\n')
    assert output(".")[0] == 0


IGNORED = """class A:
    def __del__(self):
        import os  # clean-exit-lint: ignore[import]
        import re  # noqa  # clean-exit-lint: ignore
        import io  # clean-exit-lint: ignore[async, import]
        from time import (
            sleep,
        )  # clean-exit-lint: ignore[import]
        text = "# clean-exit-lint: ignore[import]"
"""


def test_ignore_comment_hides_findings_of_its_statement(folder: Path, output: Output) -> None:
    (folder / "dirty.py").write_text(IGNORED)
    assert output(".")[0] == 0
    (folder / "dirty.py").write_text(IGNORED.replace("[import]", "[async]"))
    assert "2 import" in output(".")[1]


def test_baseline_hides_known_findings_only(folder: Path, output: Output) -> None:
    """Moved findings stay known, from any folder; one more of the same kind is new."""
    code, printed, _ = output("--write-baseline", "known.json", ".")
    assert (code, printed) == (0, "clean-exit-lint: known.json has 1 finding now\n")
    (folder / "dirty.py").write_text("# moved\n\n" + DIRTY)
    assert output("--baseline", "known.json", ".")[0] == 0
    (folder / "below").mkdir()
    os.chdir(folder / "below")
    assert output("--baseline", "../known.json", "..")[0] == 0
    (folder / "below" / "dirty.py").write_text(DIRTY)  # The same name in another folder.
    assert output("--baseline", "../known.json", ".")[0] == 1
    (folder / "dirty.py").write_text(DIRTY + "\n\n" + DIRTY.replace("A", "B"))
    code, printed, _ = output("--baseline", "../known.json", "../dirty.py")
    assert (code, "1 finding in" in printed) == (1, True)
    for wrong in ("{", '{"version": 9, "findings": []}', '{"version": 1, "findings": [1]}'):
        Path("wrong.json").write_text(wrong)
        code, _, notes = output("--baseline", "wrong.json", ".")
        assert (code, "was not written by" in notes) == (2, True), wrong


def test_settings_are_defaults_of_the_options(folder: Path, output: Output) -> None:
    """Paths are relative to the file with the settings."""
    toml = folder / "pyproject.toml"
    toml.write_text('[tool.clean-exit-lint]\nexclude = ["dirty.py"]\nformat = "json"\n')
    code, printed, _ = output(".")
    assert (code, json.loads(printed)["findings"]) == (0, [])
    toml.write_text('[tool.clean-exit-lint]\nselect = ["async"]\n')
    assert output(".")[0] == 0
    assert output("--select", "import", ".")[0] == 1
    toml.write_text('[tool.clean-exit-lint]\nbaseline = "known.json"\npaths = ["dirty.py"]\n')
    (folder / "below").mkdir()
    os.chdir(folder / "below")
    code, printed, _ = output("--write-baseline", "../known.json")
    assert (code, "1 finding" in printed) == (0, True)
    assert output()[0] == 0
    for setting, problem in (
        ("per-file-ignores = {'*' = 'all'}", "must be a table of lists of strings"),
        ("select = 'import'", "select must be a list of strings, got 'import'"),
        ("select = ['imports']", "argument --select: unknown rule 'imports'; choose from"),
    ):
        toml.write_text(f"[tool.clean-exit-lint]\n{setting}\n")
        code, _, errors = output(".")
        assert (code, problem in errors) == (2, True), errors
        assert f"{toml}: [tool.clean-exit-lint] " in errors


@pytest.mark.slow
def test_output_survives_encodings(folder: Path) -> None:
    source = "class A:\n    def __del__(self): 'ä\\'→'; import os\n"
    (folder / "dirty.py").write_text(source, "utf-8")
    done = run(".", env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (1, "")
    assert "\\u2192" in done.stdout


def test_ctrl_c_exits_with_130_and_no_traceback(folder: Path) -> None:
    os.mkfifo("pipe")
    with subprocess.Popen(
        [*COMMAND, "pipe"], stdout=-1, stderr=-1, text=True, env=ENVIRONMENT
    ) as process:
        with Path("pipe").open("w"):  # open() returns when the command has opened it.
            process.send_signal(signal.SIGINT)
            assert process.communicate() == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("''", "PATH must not be empty"),
        ("nowhere.py", "nowhere.py does not exist"),
        ("--format xml .", "invalid choice: 'xml'"),
        ("--explain what", "choose from import, global, partial-init, blocking-call"),
        ("--ignore nosuch .", "blocking-call"),
        ("--select , .", "argument --select: must not be empty"),
        ("--per-file-ignores dirty.py .", "--per-file-ignores"),
        ("--per-file-ignores dirty.py:no-such .", "unknown rule 'no-such'"),
        ("--write-baseline dirty.py", "would overwrite the program dirty.py"),
        ("--write-baseline -", "cannot be stdout; name a file"),
        ("--write-baseline no/such/folder.json .", "no/such/folder.json"),
        ("--baseline gone.json .", "gone.json"),
    ],
)
def test_wrong_usage_gets_one_line(output: Output, line: str, printed: str) -> None:
    code, text, notes = output(*shlex.split(line))
    assert (code, text, notes.count("\n")) == (2, "", 1)
    assert notes.startswith("clean-exit-lint: ")
    assert printed in notes


def test_rule_of_the_contributing_guide_works_when_pasted(tmp_path: Path) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = guide.partition("# not run: a part of rules.py\n")[2].partition("```")[0]
    added = guide.partition("1. Add `")[2].partition("`")[0]
    copy = tmp_path / "clean_exit"
    shutil.copytree(ROOT / "clean_exit", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (
        ("rules.py", None, code),
        ("findings.py", '        Rule("async"', f'        {added},\n        Rule("async"'),
    ):
        text = (copy / "lint" / name).read_text(encoding="utf-8")
        text = text.replace(old, new) if old else f"{text}\n\n{new}"
        (copy / "lint" / name).write_text(text, encoding="utf-8")
    (tmp_path / "dirty.py").write_text(
        "import tempfile\nclass A:\n    def __del__(self):\n        tempfile.mkdtemp()\n"
    )
    words = [sys.executable, "-m", "clean_exit.lint", "dirty.py"]
    done = run_command(words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "dirty.py:4:9: temporary: __del__: tempfile.mkdtemp() creates" in done.stdout


def test_pre_commit_hook_runs_the_command(folder: Path) -> None:
    """Without file names it checks the current folder."""
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    settings = dict(line.strip(" -").split(": ", 1) for line in hook.splitlines() if ": " in line)
    assert (settings["language"], settings["pass_filenames"]) == ("python", "false")
    (command,) = entry_points(group="console_scripts", name=settings["entry"])
    assert command.load()([]) == 1


OF_FLAKE8 = """class A:
    def __del__(self):
        'ä'; import os
        import re  # noqa: CEX001
        os.wait()
"""
FLAKE8_CONFIG = "[flake8]\nenable-extensions = CEX\nselect = CEX\n"


def test_flake8_reports_the_rules_and_applies_noqa(tmp_path: Path) -> None:
    """Beside another package named torch_utils."""
    pytest.importorskip("flake8")
    (tmp_path / "torch_utils").mkdir()
    (tmp_path / "torch_utils" / "__init__.py").write_text("raise RuntimeError('another one')\n")
    (tmp_path / "dirty.py").write_text(OF_FLAKE8, encoding="utf-8")
    (tmp_path / ".flake8").write_text(FLAKE8_CONFIG)
    done = run_command([sys.executable, "-m", "flake8", "dirty.py"], cwd=tmp_path, env=None)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "dirty.py:3:14: CEX001 import: __del__: import os",
        "dirty.py:5:9: CEX004 blocking-call: __del__: os.wait() has no timeout",
    ]
