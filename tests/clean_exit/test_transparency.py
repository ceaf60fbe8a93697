"""Transparency: a program sees what it sees without clean-exit, except few traces of the probe."""

import json
import os
import re
import sys
import venv
from pathlib import Path

import pytest

from clean_exit import check
from tests.support.clean_exit import QUIET, run_command
from tests.support.other_pythons import other_pythons

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
LOOK = """
import os, sys
names = ("argv", "path", "flags", "warnoptions", "orig_argv", "prefix", "executable", "path_hooks")
for name in names:
    print(name, getattr(sys, name))
ours = ("PYTHONPATH", "CLEAN_EXIT_EVENTS", "CLEAN_EXIT_TEST", "PYTEST_ADDOPTS")
print({k: v for k, v in os.environ.items() if k not in ours})
print(sorted(sys.path_importer_cache))
print(sorted(vars()), __name__, __spec__, __file__ if "__file__" in vars() else None)
print("sitecustomize" in sys.modules, "usercustomize" in sys.modules)
print(sorted(n for n in range(3, 200) if os.path.exists(f"/proc/self/fd/{n}")))
print([n for n in sys.modules if n.startswith("clean_exit.")], sys.excepthook is sys.__excepthook__)
sys.stdout.flush()
def fail(): {}["key"]
fail()
"""


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("this", "somewhere:"),
        *(pytest.param("this", path, marks=pytest.mark.slow) for path in (None, "")),
        *(pytest.param(name, "somewhere:", marks=pytest.mark.slow) for name in other_pythons()),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        ["look.py"],
        ["-m", "look"],
        pytest.param(["-c", LOOK], marks=pytest.mark.slow),
        pytest.param(["-W", "ignore", "-X", "utf8", "look.py"], marks=pytest.mark.slow),
    ],
    ids=["file", "-m", "-c", "with options"],
)
def test_variables_of_the_interpreter_output_and_exit_code_are_the_same(
    version: str, path: str | None, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    command = [PYTHONS[version], *options, "a"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    plain = run_command(command, env=env, cwd=tmp_path)
    report = check(command, env=env, cwd=tmp_path)
    assert (report.probed, report.clean) == (True, True)
    assert (report.returncode, plain.returncode) == (1, 1)
    assert report.stderr == plain.stderr
    assert re.sub("0x[0-9a-f]+", "0x", report.stdout) == re.sub("0x[0-9a-f]+", "0x", plain.stdout)


def test_environment_has_three_more_variables() -> None:
    env = {**os.environ, "PYTHONPATH": "somewhere:", "PYTEST_ADDOPTS": "-q"}
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"
    report = check(["-c", code], env=env)
    seen, path = json.loads(report.stdout)
    first, *others = seen.pop("PYTHONPATH").split(os.pathsep)
    assert (Path(first).name, others) == ("_startup", ["somewhere", ""])
    assert first not in path
    assert seen.pop("CLEAN_EXIT_EVENTS")
    assert seen.pop("CLEAN_EXIT_TEST") == env["PYTEST_CURRENT_TEST"]  # Only below a test.
    assert seen.pop("PYTEST_ADDOPTS") == "-p no:unraisableexception -p no:threadexception -q"
    assert seen.keys() - {"LC_CTYPE"} == env.keys() - {"LC_CTYPE", "PYTHONPATH", "PYTEST_ADDOPTS"}


@pytest.mark.parametrize("flags", [["-I"], ["-S"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_isolated_python_is_observed_from_outside_only(
    version: str, flags: list[str], tmp_path: Path
) -> None:
    source = "import sys\nclass A:\n  def __del__(self): 1 / 0\nprint(sys.argv[1:])\nA()\n"
    (tmp_path / "dirty.py").write_text(source)
    report = check([PYTHONS[version], *flags, "dirty.py", "a"], cwd=tmp_path)
    assert [finding.id for finding in report.findings] == ["unraisable"]
    assert report.stdout == "['a']\n"
    assert not report.probed
    (tmp_path / "dirty.py").write_text("import sys; sys.unraisablehook = print; " + source)
    assert check([PYTHONS[version], *flags, "dirty.py"], cwd=tmp_path).clean


def test_own_sitecustomize_is_imported_once(tmp_path: Path) -> None:
    path = tmp_path / "sitecustomize.py"
    path.write_text("print('mine', __file__)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    report = check(["-c", "import sitecustomize; print(sitecustomize.__file__)"], env=env)
    assert (report.stdout, report.probed) == (f"mine {path}\n{path}\n", True)


@pytest.mark.slow
def test_executable_must_name_its_interpreter_unless_it_is_python(tmp_path: Path) -> None:
    look = "import sys; print(sys.flags.isolated)"
    for name, text, code, printed in (
        ("x.py", look, 0, "0\n"),
        ("y.py", f"#!{sys.executable} -I\n{look}", 0, "1\n"),
        ("script", "echo from $0", 126, ""),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        done = run_command([*QUIET[:-1], f"./{name}"], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, printed)


def test_probe_imports_only_light_modules() -> None:
    command = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    plain = run_command(command).stdout.split()
    added = {*run_command([*QUIET, *command]).stdout.split()} - {*plain}
    assert len(added) < 20
    names = {name.partition(".")[0] for name in added}
    assert names - sys.stdlib_module_names == {"clean_exit_probe"}


def test_python_of_a_virtual_environment_keeps_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    report = check([python, "-c", "import sys; print(sys.prefix, sys.flags.no_site)"])
    assert report.stdout == f"{tmp_path / 'env'} 0\n"
    assert report.probed
