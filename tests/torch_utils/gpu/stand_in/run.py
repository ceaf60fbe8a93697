"""Run the GPU tests over a stand-in for CUDA.

uv installs torch for CUDA, several gigabytes, into an environment. With a folder as argument the
environment is kept or reused; otherwise it is removed. ``CXX`` (g++) compiles the stand-in with the
headers that come with torch. The results are written to benchmarks/results/gpu_stand_in.json. They
do not show a GPU's speed, numbers or driver; see docs/gpu.md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
SOURCES = Path(__file__).resolve().parent
RESULT = "gpu_stand_in"
ALL_S = 3600.0
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]


def build(environment: Path, folder: Path) -> None:
    """Compile the stand-in, and link the driver and NVML to it."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    library = folder / "libstand_in.so"
    # Triton has the headers that CUDA's packages lack.
    headers = ("nvidia/cu13/include", "triton/backends/nvidia/include")
    include = [word for name in headers for word in ("-isystem", str(packages / name))]
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared"]
    output = ["-fPIC", "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run([*compiler, *include, *sources, *output], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(library.name)


def variables(libraries: Path, state: Path) -> dict[str, str]:
    """Return the environment of a program; ``state`` is a new folder for the devices' state."""
    state.mkdir(parents=True)
    return {
        "LD_PRELOAD": str(libraries / "libstand_in.so"),
        "LD_LIBRARY_PATH": str(libraries),
        "CUDA_STAND_IN": str(state),
        "CUDA_STAND_IN_DEVICES": "2",
        "HF_HUB_OFFLINE": "1",
    }


def run_all(python: str, folder: Path) -> dict[str, Any]:
    """Run the tests."""
    from tests.torch_utils.gpu.run import run_tests

    env = variables(folder / "libraries", folder / "state")
    tests = run_tests("cuda", ALL_S, python, env)["tests"]
    for test in tests.values():  # The other lines of a failure name files of this machine.
        test["reason"] = (test["reason"].strip().splitlines() or [""])[-1]
    code = "import json; from benchmarks.results_file import machine; print(json.dumps(machine()))"
    about = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return {"machine": json.loads(about.stdout), "tests": tests}


def main(kept: str | None = None) -> int:
    """Run the tests, and write the results; return the exit code."""
    from benchmarks.results_file import write
    from tests.support.versions import make_environment

    with tempfile.TemporaryDirectory() as temporary:
        environment = Path(kept or Path(temporary, "environment")).absolute()
        if not (environment / "bin" / "python").exists():
            make_environment("gpu", environment)
        libraries = Path(temporary, "libraries")
        libraries.mkdir()
        build(environment, libraries)
        result = run_all(str(environment / "bin" / "python"), Path(temporary))
    write(RESULT, result)
    wrong = [
        f"{t['outcome']}: {n}: {t['reason']}"
        for n, t in result["tests"].items()
        if t["outcome"] not in ("passed", "skipped")
    ]
    counts = Counter(test["outcome"] for test in result["tests"].values())
    print(*wrong, counts, sep="\n")
    return int(bool(wrong) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
