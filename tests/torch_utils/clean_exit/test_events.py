"""The record: bounded, whatever happens in the program, and never taken on trust."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_utils.clean_exit import check
from torch_utils.clean_exit.command import add_probe
from torch_utils.clean_exit.events import read_events

MANY = """
class A:
    def __del__(self): raise ValueError("the driver is gone{}")
for number in range(2000): A()
"""
GLOO = """
import sys, tempfile
import torch.distributed as dist, torch.multiprocessing as mp
def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
    dist.barrier()
    {end}
if __name__ == "__main__":
    mp.spawn(work, (tempfile.mkdtemp() + "/store",), 2)
"""
TORCHRUN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
{end}
"""
INHERITED = """
import os, sys, types
distributed = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: is_on
distributed.get_backend = lambda: "gloo"
sys.modules["torch.distributed"] = distributed
is_on = {before}
if os.fork() == 0:
    is_on = True
    sys.exit()
os.wait()
is_on = False
"""
START = "('start', 7, 1.0, 'main', '3.11', 'python')\n"
DESTROY = "dist.destroy_process_group()"


def record(source: str, tmp_path: Path) -> Path:
    """Run a program with the probe alone, and return what it has recorded."""
    events = tmp_path / "events"
    events.touch()
    command, env = add_probe([sys.executable, "-c", source], os.environ, events)
    subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
    return events


@pytest.mark.parametrize("differs", ["", "' + str(number) + '"])
def test_many_errors(differs: str, tmp_path: Path) -> None:
    """Thousands are counted; only the first of those that are alike are recorded in full."""
    source = MANY.format(differs).replace('"', "'")
    size = record(source, tmp_path).stat().st_size
    assert size < 200_000
    report = check(["-c", source])
    assert {finding.id for finding in report.findings} == {"unraisable"}
    assert len(report.findings) < 30
    assert len(str(report)) < 30_000
    if not differs:
        assert "at least 1997 more: ValueError: the driver is gone" in str(report)
    assert check(["-c", source], ignore=["the driver is gone"]).clean or differs


def test_stacks_are_offered(tmp_path: Path) -> None:
    """The process, and the number of the file, for who wants to ask for stacks."""
    events = record("import os; os.fstat(250); os.fstat(251)", tmp_path)
    (start,) = [
        ast.literal_eval(line) for line in events.read_text().splitlines() if line[2:7] == "start"
    ]
    inside = read_events(events, start[1])
    assert inside.offers_stacks is not None
    assert inside.offers_stacks[1] in range(250, 260)
    assert inside.is_alone
    assert not read_events(events, start[1] + 1).is_alone


def test_a_number_in_use_is_left_alone(tmp_path: Path) -> None:
    """A file that the program inherits keeps its number, and its content."""
    path = tmp_path / "inherited"
    source = "import os; print(os.readlink('/proc/self/fd/250'))"
    shell = f'exec 250> {path}; {sys.executable} -c "{source}"'
    report = check(["bash", "-c", shell])
    assert report.stdout == f"{path}\n"
    assert report.probed
    assert path.read_bytes() == b""


def test_a_crash_writes_into_no_file(tmp_path: Path) -> None:
    """Of the program: one that has taken all numbers of the probe's."""
    path = tmp_path / "mine"
    source = f"""
import os
file = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY)
for number in range(200, 300):
    os.dup2(file, number)
class A:
    def __del__(self): 1 / 0
A()
os.abort()
"""
    report = check(["-c", source])
    assert [finding.id for finding in report.findings] == ["unraisable", "crash"]
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "('start',)",
        "('start', True, 1.0, 'main', '3.11', 'python')",
        "('start', 7, 1e999, 'main', '3.11', 'python')",
        "('start', 7, 1.0, 'nowhere', '3.11', 'python')",
        "('start', 7, 1.0, [], '3.11', 'python')",
        "(" * 5000,
        START + "('teardown', 7, 1.0, 'main', 5)",
        START + "('unraisable', 7, 1.0, 'main')",
        START + "('unraisable', 7, 1.0, 'main', 1, 2, 3, 4, 5)",
        START + "('again', 7, 1.0, 'main', 'x', [])",
        START + "('again', 7, 1.0, 'main', 9, 1, 2, 3, 4, 5)",
        START + "('leaked', 7, 1.0, 'main', None)",
        START + "('process-group', 7, 1.0, 'main')",
    ],
)
def test_nonsense(line: str, tmp_path: Path) -> None:
    """What no probe has written is passed over."""
    events = tmp_path / "events"
    events.write_text(line + "\n\0\xff\n('main-ended', 7, 2.0, 'threads')\n")
    inside = read_events(events, 7)
    assert not inside.is_alone
    assert inside.findings == []
    assert inside.main_ended_s == (None if inside.pid is None else 2.0)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "endless"])
def test_not_a_file(kind: str, tmp_path: Path) -> None:
    """A program that puts something else in its place does not make the checker wait."""
    events = tmp_path / "events"
    if kind == "fifo":
        os.mkfifo(events)
    elif kind == "folder":
        events.mkdir()
    else:
        events.symlink_to("/dev/zero" if kind == "endless" else tmp_path)
    assert read_events(events, 7).pid is None


def test_group_of_the_parent() -> None:
    """A forked child that leaves in order has not made its parent's group; its own it has."""
    assert check(["-c", INHERITED.format(before=True)]).clean
    report = check(["-c", INHERITED.format(before=False)])
    assert [finding.id for finding in report.findings] == ["process-group-not-destroyed"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "torchrun"])
def test_groups_of_workers(how: str, tmp_path: Path) -> None:
    """gloo says nothing: each worker is asked from inside."""
    for end in ("pass", DESTROY):
        path = tmp_path / "program.py"
        path.write_text((GLOO if how == "spawn" else TORCHRUN).format(end=end))
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*(run if how == "torchrun" else []), str(path)]
        report = check(command, timeout_s=300.0)
        found = [finding.id for finding in report.findings]
        assert found == (["process-group-not-destroyed"] * 2 if end == "pass" else []), str(report)


def test_a_program_that_comes_through_a_pipe() -> None:
    """The probe leaves the bytes of a FIFO to the program, which is judged as any other."""
    dirty = "class A:\n    def __del__(self): 1 / 0\na = A()\nprint('ran')"
    command = ["bash", "-c", f'exec {sys.executable} <(cat <<"END"\n{dirty}\nEND\n)']
    report = check(command, timeout_s=600)
    assert report.stdout == "ran\n", str(report)
    assert [finding.id for finding in report.findings] == ["unraisable"], str(report)


def test_code_named_after_a_pipe(tmp_path: Path) -> None:
    """The checker looks for source lines in plain files only."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    source = (
        f"exec(compile('class A:\\n  def __del__(self): 1 / 0\\na = A()', {str(fifo)!r}, 'exec'))"
    )
    report = check([sys.executable, "-c", source], timeout_s=600)
    assert [finding.id for finding in report.findings] == ["unraisable"], str(report)


@pytest.mark.parametrize(
    "line",
    [
        "('again', 1, 1.0, 'main', 10, 'unraisable', 'main', (), 5, 'm')",
        "('again', 1, 1.0, 'main', 0x" + "f" * 20_000 + ", 'unraisable', 'main', (), 'E', 'm')",
        "('start', 0x" + "f" * 20_000 + ", 1.0, 'main', '3.11', 'python')",
    ],
    ids=["types", "count", "pid"],
)
def test_lines_that_no_probe_writes(tmp_path: Path, line: str) -> None:
    """They are passed over, and what is read can be shown."""
    path = tmp_path / "events"
    path.write_text(f"('start', 1, 1.0, 'main', '3.11', 'python')\n{line}\n")
    assert str(read_events(path, 1).findings) is not None


def test_other_threads_that_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 fails for them now and then, which loses no entry."""
    record(MANY.format(""), tmp_path)
    usual, calls = ast.literal_eval, []

    def failing(text: str) -> object:
        calls.append(text)
        if len(calls) % 2:
            raise SystemError("AST constructor recursion depth mismatch")
        return usual(text)

    expected = read_events(tmp_path / "events", 1)
    monkeypatch.setattr(ast, "literal_eval", failing)
    assert read_events(tmp_path / "events", 1) == expected
    assert calls
