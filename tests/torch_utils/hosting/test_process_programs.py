"""Programs with a model in a process of its own: how both leave, and what the other prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosted_models import Model

from programs import assert_clean, run
from torch_utils.hosting.process import ModelProcess, pickled_load
from watching import is_there, wait_for


def start(load=Model) -> ModelProcess:
    process = ModelProcess(pickled_load(load), name="stub")
    process.wait_until_loaded()
    return process


PRELUDE = """
import sys
from functools import partial
from hosted_models import Model
from torch_utils.hosting.process import ModelProcess, pickled_load
def start(load):
    process = ModelProcess(pickled_load(load), name="stub")
    process.wait_until_loaded()
    return process
"""
TESTS = str(Path(__file__).resolve().parent.parent)


def run_program(source: str, *arguments: str, as_file: bool = False):
    options = ("-W", "error")
    path = os.pathsep.join([str(Path(TESTS).parent.parent), str(Path(TESTS).parent), TESTS])
    return run(
        PRELUDE + source, *arguments, options=options, env={"PYTHONPATH": path}, as_file=as_file
    )


@pytest.mark.parametrize(
    "end",
    [
        "",
        *(
            pytest.param(e, marks=pytest.mark.slow)
            for e in ("process.end()", "del process", "sys.exit(0)")
        ),
    ],
)
def test_leaves_with_the_program(end: str) -> None:
    """Ended, dropped or left open: nothing on stderr, and no process."""
    result = run_program(f"process = start(Model)\nprint(process.pid)\n{end}")
    assert_clean(result)
    assert not is_there(int(result.stdout))


def test_parent_imports_no_torch(tmp_path: Path) -> None:
    """Not even where the child has it, and answers with its classes."""
    (tmp_path / "torch.py").write_text(
        "class Tensor: pass\nclass OutOfMemoryError(RuntimeError): pass\n"
    )
    result = run_program(
        """
class Torch:
    def give(self):
        import torch
        return torch.Tensor()
    def fail(self):
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory")
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    process = start(Torch)
    for name in ("give", "fail"):
        try:
            process.call(name)
        except Exception as error:
            print(type(error).__name__)
    process.end()
    assert "torch" not in sys.modules and "numpy" not in sys.modules
""",
        str(tmp_path),
        as_file=True,
    )
    assert_clean(result)
    assert result.stdout.split() == ["ModelProcessError"] * 2


@pytest.mark.parametrize(
    "method", [pytest.param("touch_and_sleep", marks=pytest.mark.slow), "touch_and_spin"]
)
def test_goes_with_a_parent_that_is_killed(tmp_path: Path, method: str) -> None:
    """Whatever it is doing, and although a fork of the parent lives on."""
    begun = tmp_path / "begun"
    result = run_program(
        f"""
import os, threading, time
process = start(Model)
print(process.pid, flush=True)
def kill():
    while not os.path.exists({str(begun)!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if os.fork() == 0:
    for descriptor in range(3):
        os.close(descriptor)
    time.sleep(600)
    os._exit(0)
threading.Thread(target=kill, daemon=True).start()
process.call({method!r}, {str(begun)!r})
"""
    )
    assert result.returncode == -9, str(result)
    wait_for(lambda: not is_there(int(result.stdout)))


def test_what_it_prints_is_printed() -> None:
    """To stdout and stderr of the parent, more than any pipe takes, beside the answers."""
    result = run_program(
        "process = start(Model)\nassert process.call('say', 300_000) == 300_000\nprocess.end()"
    )
    assert result.returncode == 0, str(result)
    assert result.stdout == "to stdout " * 300_000 + "\n"
    assert result.stderr == "to stderr " * 300_000 + "\n"


MAIN = """
class Mine(Exception):
    pass
class Own:
    def echo(self, value): return value
    def fail(self): raise Mine("mine")
{guard}
    process = start(partial(Own))
    print(process.call("echo", Own()).echo(3))
    try:
        process.call("fail")
    except Mine as error:
        print(repr(error))
"""


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "-c"])
@pytest.mark.parametrize(
    "guard", ['if __name__ == "__main__":', pytest.param("if True:", marks=pytest.mark.slow)]
)
def test_classes_of_the_main_module(guard: str, as_file: bool) -> None:
    """From a file or from the command line; also where the program guards nothing."""
    result = run_program(MAIN.format(guard=guard), as_file=as_file)
    assert_clean(result)
    assert result.stdout == "3\nMine('mine')\n"


def test_nothing_is_run_again_unless_it_is_needed() -> None:
    """The main module is, only for what was defined in it."""
    result = run_program("print('once')\nassert start(Model).call('echo', 1) == 1", as_file=True)
    assert_clean(result)
    assert result.stdout == "once\n"


@pytest.mark.parametrize(
    "closed",
    [(0, 1, 2), *(pytest.param(c, marks=pytest.mark.slow) for c in ((0,), (1, 2)))],
    ids=str,
)
def test_closed_standard_descriptors(closed: tuple[int, ...]) -> None:
    """Nothing of the other process gets their numbers, which it has for other things."""
    result = run_program(
        f"""
import os
import subprocess
import sys
for descriptor in {closed}:
    os.close(descriptor)
process = start(Model)
answer = process.call("echo", b"x" * 1_000_000)
process.end()
os._exit(answer != b"x" * 1_000_000)
"""
    )
    assert_clean(result)


def test_program_that_is_piped_in() -> None:
    """What it defines cannot be found from another process, which is said at once."""
    source = (
        "class Own: pass\ntry:\n    pickled_load(Own)\nexcept TypeError as error:\n    print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error"],
        input=PRELUDE + source,
        env={**os.environ, "PYTHONPATH": TESTS + os.pathsep + str(Path(TESTS).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "defined in an interactive session" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    "as_file", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["file", "-c"]
)
def test_process_of_a_process(as_file: bool) -> None:
    """A model with a host of its own finds the main module's classes too, and takes it along."""
    result = run_program(
        """
import os
from torch_utils import ModelHost
class Inner:
    def double(self, value): return 2 * value, os.getpid()
class Outer:
    def __init__(self): self.host = ModelHost(Inner, isolation="process")
    def double(self, value):
        with self.host.lease() as model: return model.double(value)
    def close(self): self.host.close()
if __name__ == "__main__":
    with ModelHost(Outer, isolation="process") as host, host.lease() as model:
        print(*model.double(4))
""",
        as_file=as_file,
    )
    assert_clean(result)
    value, pid = map(int, result.stdout.split())
    assert value == 8
    assert not is_there(pid)


def test_without_descriptors_it_says_so_and_keeps_none() -> None:
    """However many are lacking to start a process."""
    result = run_program(
        """
import os, resource
from torch_utils import ModelProcessError
def count(): return len(os.listdir("/proc/self/fd"))
before = count()
for lacking in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + lacking, 4096))
    try:
        start(Model).end()
    except ModelProcessError:
        print("refused")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    assert count() == before, (lacking, count(), before)
"""
    )
    assert_clean(result)
    assert result.stdout.count("refused") > 5
