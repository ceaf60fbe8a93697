"""Transparency: a program sees what it sees without clean-exit, except few traces of the probe."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from clean_exit import check
from tests.support.clean_exit import CHECKER, QUIET, run_command
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
"""


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("this", "somewhere:"),
        *(pytest.param("this", path, marks=pytest.mark.slow) for path in (None, "")),
        *(pytest.param(name, "somewhere:", marks=pytest.mark.slow) for name in other_pythons()),
    ],
)
@pytest.mark.parametrize("how", ["file", "-c", "-m", "with options"])
def test_arguments_paths_flags_and_variables_are_the_same(
    version: str, how: str, path: str | None, tmp_path: Path
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    target = {"file": ["look.py", "a"], "-c": ["-c", LOOK, "a"], "-m": ["-m", "look", "a"]}
    options = ["-W", "ignore", "-X", "utf8"] if how == "with options" else []
    command = [PYTHONS[version], *options, *target.get(how, ["look.py"])]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    plain = subprocess.check_output(command, env=env, cwd=tmp_path, text=True)
    report = check(command, env=env, cwd=tmp_path)
    assert report.probed
    assert without_addresses(report.stdout) == without_addresses(plain)


def test_environment_has_three_more_variables() -> None:
    env = {**os.environ, "PYTHONPATH": "somewhere:", "PYTEST_ADDOPTS": "-q"}
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"
    report = check(["-c", code], env=env)
    seen, path = json.loads(report.stdout)
    first, *others = seen.pop("PYTHONPATH").split(os.pathsep)
    assert Path(first).name == "_startup"
    assert others == ["somewhere", ""]
    assert first not in path
    assert seen.pop("CLEAN_EXIT_EVENTS")
    assert seen.pop("CLEAN_EXIT_TEST") == env["PYTEST_CURRENT_TEST"]  # Only below a test.
    assert seen.pop("PYTEST_ADDOPTS") == "-p no:unraisableexception -p no:threadexception -q"
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):
        env.pop(name, None)
    assert seen.keys() - {"LC_CTYPE"} == env.keys() - {"LC_CTYPE"}


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


@pytest.mark.parametrize("flags", [[], ["-I"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_traceback_and_exit_code_are_the_same(
    version: str, flags: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("def f():\n    return {}['key']\n\nf()\n")
    command = [PYTHONS[version], *flags, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = check(command)
    assert (report.stderr, report.returncode) == (done.stderr, 1)
    assert report.clean


def test_own_sitecustomize_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    report = check(["-c", "import sitecustomize; print(sitecustomize.__file__)"], env=env)
    path = tmp_path / "sitecustomize.py"
    assert report.stdout == f"mine {path}\n{path}\n"
    assert report.probed


@pytest.mark.slow
def test_executable_must_name_its_interpreter_unless_it_is_python(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import sys; print(sys.argv)")
    (tmp_path / "script").write_text("echo from $0")
    (tmp_path / "y.py").write_text(f"#!{sys.executable} -I\nimport sys; print(sys.flags.isolated)")
    for name in ("x.py", "y.py", "script"):
        (tmp_path / name).chmod(0o755)
    assert run_command([*CHECKER, "-q", "x.py"], cwd=tmp_path).stdout == "['x.py']\n"
    assert run_command([*CHECKER, "-q", "y.py"], cwd=tmp_path).stdout == "1\n"
    assert run_command([*QUIET, "./script"], cwd=tmp_path).returncode == 126


def test_probe_imports_only_light_modules() -> None:
    names = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    plain, below = (
        set(run_command([*prefix, *names]).stdout.split()) for prefix in (list[str](), QUIET)
    )
    added = below - plain
    assert "clean_exit_probe" in added
    assert len(added) < 20
    assert {name.partition(".")[0] for name in added} - sys.stdlib_module_names == {
        "clean_exit_probe"
    }


def test_python_of_a_virtual_environment_keeps_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    report = check([python, "-c", "import sys; print(sys.prefix, sys.flags.no_site)"])
    assert report.stdout == f"{tmp_path / 'env'} 0\n"
    assert report.probed
