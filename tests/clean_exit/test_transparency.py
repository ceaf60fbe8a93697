"""A program does not notice that it is checked: all that it can look at is what it plainly is."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from support.clean_exit import CHECKER, MODULE, PACKAGE, QUIET, check, run_command
from support.other_pythons import other_pythons

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
LOOK = """
import os, sys
names = ("argv", "path", "flags", "warnoptions", "orig_argv", "prefix", "executable", "path_hooks")
for name in names:
    print(name, getattr(sys, name))
print(sorted(os.environ))
print(os.environ.get("PYTHONPATH"), sorted(sys.path_importer_cache))
print(sorted(vars()), __name__, __spec__, __file__ if "__file__" in vars() else None)
print("sitecustomize" in sys.modules, "usercustomize" in sys.modules)
print(sorted(n for n in range(3, 200) if os.path.exists(f"/proc/self/fd/{n}")))
print([n for n in sys.modules if "clean_exit" in n], sys.excepthook is sys.__excepthook__)
"""


def run_plainly(command: list[str], env: dict[str, str], tmp_path: Path) -> str:
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return without_addresses(done.stdout)


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize(
    ("version", "path"),
    [
        *(("this", path) for path in (None, "", "somewhere:")),
        *(pytest.param(name, "somewhere:", marks=pytest.mark.slow) for name in other_pythons()),
    ],
)
@pytest.mark.parametrize("how", ["file", "-c", "-m", "with options"])
def test_nothing_looks_different(version: str, how: str, path: str | None, tmp_path: Path) -> None:
    """Arguments, paths, flags, files, modules and variables are what they are without it."""
    (tmp_path / "look.py").write_text(LOOK)
    target = {"file": ["look.py", "a"], "-c": ["-c", LOOK, "a"], "-m": ["-m", "look", "a"]}
    options = ["-W", "ignore", "-X", "utf8"] if how == "with options" else []
    command = [PYTHONS[version], *options, *target.get(how, ["look.py"])]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    expected = run_plainly(command, env, tmp_path)
    report = check(command, env=env, cwd=tmp_path)
    assert report.probed
    assert without_addresses(report.stdout) == expected


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"], ["-I", "-S"], ["-IBc"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_isolated_interpreter(version: str, flags: list[str], tmp_path: Path) -> None:
    """Where the environment or site is ignored, the program is launched in the same way."""
    # Two things do tell: the interpreter's own command line, and a folder that was looked into.
    look = LOOK.replace('"orig_argv", ', "").replace(", sorted(sys.path_importer_cache)", "")
    (tmp_path / "look.py").write_text(look)
    target = [look] if flags[-1].endswith("c") else ["look.py", "a"]
    command = [PYTHONS[version], *flags, *target]
    report = check(command, cwd=tmp_path)
    assert report.probed
    assert without_addresses(report.stdout) == run_plainly(command, dict(os.environ), tmp_path)


@pytest.mark.parametrize("flags", [[], ["-I"]])
@pytest.mark.parametrize("version", VERSIONS)
def test_tracebacks_are_the_same(version: str, flags: list[str], tmp_path: Path) -> None:
    """The traceback is the program's own, to the letter, and so is the exit code."""
    program = tmp_path / "fails.py"
    program.write_text("def f():\n    return {}['key']\n\nf()\n")
    command = [PYTHONS[version], *flags, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = check(command)
    assert (report.stderr, report.returncode) == (done.stderr, 1)
    assert report.clean


def test_own_sitecustomize(tmp_path: Path) -> None:
    """The program's is imported, once, from where it is."""
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    report = check(["-c", "import sitecustomize; print(sitecustomize.__file__)"], env=env)
    path = tmp_path / "sitecustomize.py"
    assert report.stdout == f"mine {path}\n{path}\n"
    assert report.probed


def test_own_sitecustomize_that_fails(tmp_path: Path) -> None:
    """What Python says about it is what it says without the probe."""
    (tmp_path / "sitecustomize.py").write_text("import module_that_is_not_there\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "print(1)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    report = check(command, env=env)
    assert (report.stdout, report.returncode) == (done.stdout, done.returncode)
    assert report.stderr == done.stderr


def test_virtual_environment(tmp_path: Path) -> None:
    """A virtual environment stays one."""
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    report = check([python, "-c", "import sys; print(sys.prefix, sys.flags.no_site)"])
    assert report.stdout == f"{tmp_path / 'env'} 0\n"
    assert report.probed


SHOW = (
    "import sys; print(sys.argv, sys.path[:2], __file__, type(__loader__), __spec__ is None, "
    "sys.orig_argv, sorted(globals()), __doc__)\n"
)
DIRTY_PROGRAM = "class A:\n    def __del__(self): raise ValueError('dirty')\na = A()\n"
QUICK = "-I look.py a|-Ix skip.py|-I package c|-I error.py|-I -m look b|-I missing.py".split("|")
COMMANDS = """
-I look.py a|-E ./look.py|-I -W error look.py|-IWerror look.py|-S look.py|-I -m look b
-I look.pyc a|-I compiled|-I bad.pyc|-I missing.py|-I empty|-Ix skip.py|-x -E skip.py
-I package/|-I package c|-E ./package/|-I archive.pyz d|-I syntax.py|-I -c print(|-I error.py
-I interrupted.py|-I -m missing|-I -c|-I -m|-I /dev/null
""".strip().replace("\n", "|")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, of every kind that Python runs."""
    folder = tmp_path_factory.mktemp("isolated")
    for name in ("package", "empty"):
        (folder / name).mkdir()
    for name in ("look.py", "package/__main__.py"):
        (folder / name).write_text(SHOW)
    for name in ("look.pyc", "compiled"):
        py_compile.compile(str(folder / "look.py"), str(folder / name), doraise=True)
    (folder / "bad.pyc").write_bytes(b"not compiled by this Python")
    (folder / "skip.py").write_text("not Python, for some shell\nprint('skipped')\n")
    (folder / "syntax.py").write_text("print('a'\n")
    (folder / "error.py").write_text(
        "def f():\n  raise KeyError(1)\ntry:\n  f()\nexcept KeyError as error:\n"
        "  raise ValueError(2) from error\n"
    )
    (folder / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    with zipfile.ZipFile(folder / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        line if line in QUICK else pytest.param(line, marks=pytest.mark.slow)
        for line in COMMANDS.split("|")
    ],
)
def test_isolated_programs_run_as_plainly(line: str, folder: Path) -> None:
    """Also where there is nothing to run: the message is Python's own."""
    command = [sys.executable, *line.split(" ")]
    plain, below = (run_command([*prefix, *command], cwd=folder) for prefix in ([], QUIET))
    plain_out, below_out = (re.sub(" at 0x[0-9a-f]+", "", d.stdout) for d in (plain, below))
    assert below_out == plain_out
    assert below.stderr == plain.stderr
    expected = plain.returncode if plain.returncode >= 0 else 128 - plain.returncode
    assert below.returncode == expected


@pytest.mark.parametrize("options", [["-I"], ["-Ix"]])
def test_isolated_programs_are_seen_from_inside(options: list[str], tmp_path: Path) -> None:
    """The reason for all this: also when it says nothing on stderr."""
    program = tmp_path / "dirty.py"
    program.write_text("\n" + DIRTY_PROGRAM)
    if options == ["-I"]:
        py_compile.compile(str(program), str(tmp_path / "dirty.pyc"), doraise=True)
        program = tmp_path / "dirty.pyc"
    quiet = f"exec {sys.executable} {' '.join(options)} {program} 2>/dev/null"
    assert check([sys.executable, *options, str(program)]).probed
    report = check([sys.executable, *options, str(program)])
    assert [finding.id for finding in report.findings] == ["unraisable"]
    assert report.findings[0].phase == "teardown"
    assert not check(["sh", "-c", quiet]).probed  # The control: hidden in a shell it is not.


@pytest.mark.slow
def test_executable_without_an_interpreter(tmp_path: Path) -> None:
    """A Python file is Python's; anything else the shell's, as for execvp(3)."""
    (tmp_path / "x.py").write_text("import sys; print(sys.argv)")
    (tmp_path / "script").write_text("echo from $0")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "y.py").write_text(f"#!{sys.executable} -I\nimport sys; print(sys.flags.isolated)")
    for name in ("x.py", "y.py", "script", "binary"):
        (tmp_path / name).chmod(0o755)
    assert run_command([*CHECKER, "-q", "x.py"], cwd=tmp_path).stdout == "['x.py']\n"
    assert run_command([*CHECKER, "-q", "y.py"], cwd=tmp_path).stdout == "1\n"
    assert run_command([*QUIET, "./script"], cwd=tmp_path).stdout == "from ./script\n"
    assert run_command([*QUIET, "./binary"], cwd=tmp_path).returncode == 126


@pytest.mark.slow
def test_packages_and_archives_run_as_plainly(tmp_path: Path) -> None:
    """``python -I FOLDER`` and an archive run as plainly; so does ``-mMODULE``."""
    source = "import sys; print(__name__, sys.argv[1:], sys.path[0], __file__)"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(source)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
    for target in ("folder", "app.pyz"):
        command = [sys.executable, "-I", target, "a"]
        plain = run_command(command, cwd=tmp_path)
        below = run_command([*QUIET, *command], cwd=tmp_path)
        assert (below.stdout, below.stderr) == (plain.stdout, plain.stderr)
    assert run_command([*CHECKER, "-q", "-mfolder", "a"], cwd=tmp_path).returncode == 0


# In each of them stderr is not the checker's: a terminal's, nobody's, or closed.
WAYS = {
    "pty.spawn": "import pty; pty.spawn([sys.executable, __file__, 'again'])",
    "pty.fork": """
import pty
pid, terminal = pty.fork()
if pid == 0:
    os.execve(sys.executable, [sys.executable, __file__, 'again'], {})
try:
    while os.read(terminal, 1024):
        pass
except OSError:
    pass
os.waitpid(pid, 0)
""",
    "os.spawnl": "os.close(2); os.spawnl(os.P_WAIT, sys.executable, 'python', __file__, 'again')",
    "os.execlp": """
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.environ['PATH'] = os.path.dirname(sys.executable)
os.execlp(os.path.basename(sys.executable), 'python', __file__, 'again')
""",
}
PROGRAM = """
import os, sys
if len(sys.argv) == 1:
{start}
    sys.exit()
class A:
    def __del__(self): {body}
last = A()
"""
ERRORS = """
import os, sys, traceback
def attempt(function, *args, **options):
    try:
        function(*args, **options)
    except Exception:
        traceback.print_exc()
python = sys.executable
attempt(os.execvp, "nowhere", ["x"])
attempt(os.execv, "/nowhere/python3", ["x"])
attempt(os.execv, python, ["x"], {})
attempt(os.execv, python, "text")
attempt(os.execv, python, ["null\\0"])
attempt(os.execve, python, ["x"])
attempt(os.execve, python, ["x"], {"a=": "b"})
attempt(os.execve, env={1: 2}, path=python, argv=["x"])
class Runner:
    run = os.execv
attempt(Runner().run, "/nowhere", ["x"])
print(os.execve in os.supports_fd, os.execv.__name__, os.execve.__doc__, file=sys.stderr)
show = "import os, sys; print(sorted(os.environ.items()), sys.path, sys.argv)"
os.execve(python, ["python", "-c", show, "a"], {"PYTHONPATH": "b:", "A": "1"})
"""


def findings_after(python: str, how: str, body: str, folder: Path) -> set[str]:
    path = folder / "program.py"
    start = "".join(f"    {line}\n" for line in WAYS[how].strip().splitlines())
    path.write_text(PROGRAM.format(start=start, body=body))
    report = check([python, str(path)], stdin=subprocess.DEVNULL, timeout_s=120)
    assert report.returncode == 0, report.stderr
    return {finding.id for finding in report.findings}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_that_is_executed_is_seen(version: str, how: str, tmp_path: Path) -> None:
    """What such a program leaves behind is found; its clean twin is clean."""
    assert findings_after(PYTHONS[version], how, "1 / 0", tmp_path) == {"unraisable"}
    assert findings_after(PYTHONS[version], how, "pass", tmp_path) == set()


@pytest.mark.parametrize("version", VERSIONS)
def test_errors_of_exec_are_the_same(version: str, tmp_path: Path) -> None:
    """Errors, to the letter of their tracebacks, and what the new program sees are the same."""
    path = tmp_path / "program.py"
    path.write_text(ERRORS)
    command = [PYTHONS[version], str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    report = check(command, stdin=subprocess.DEVNULL)
    assert (report.stdout, report.stderr) == (done.stdout, done.stderr)
    assert report.clean


def test_a_probe_that_cannot_be_read_is_not_offered(tmp_path: Path) -> None:
    """As another user's: then nothing is put into the environment of others."""
    library = tmp_path / "lib"
    library.mkdir()
    source = Path(sys.modules[PACKAGE].__path__[0])
    subprocess.run(["cp", "-r", str(source), str(library / PACKAGE)], check=True)
    program = (
        f"import os, shutil, subprocess, sys; shutil.rmtree({str(library)!r})\n"
        "code = 'import os; print(sorted(n for n in os.environ if \"CLEAN_EXIT\" in n))'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
        "os.execv(sys.executable, [sys.executable, '-c', code])"
    )
    environment = {**os.environ, "PYTHONPATH": str(library)}
    done = run_command([sys.executable, "-m", MODULE, "-q", "-c", program], env=environment)
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr


def test_little_is_imported_into_the_program() -> None:
    """Some modules of the standard library, and none of weight."""
    names = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    plain, below = (set(run_command([*prefix, *names]).stdout.split()) for prefix in ([], QUIET))
    added = below - plain
    assert added
    assert len(added) < 20
    assert {name.partition(".")[0] for name in added} <= sys.stdlib_module_names


def test_an_interpreter_in_the_program_sees_its_own_environment() -> None:
    """A second one loads the same sitecustomize, when there is nothing to put back any more."""
    code = """
import ctypes, os
try: import _interpreters as i
except ImportError: import _xxsubinterpreters as i
number = i.create()
print(os.environ.get("PYTHONPATH"))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"PYTHONPATH"))
"""
    report = check(["-c", code], env={"PYTHONPATH": "/somewhere"})
    assert report.stdout == "/somewhere\nb'/somewhere'\n", report
