"""`make test-gpu-stand-in`: the GPU tests over a stand-in for CUDA, and their controls.

uv installs torch for CUDA, several gigabytes, into an environment. With a folder as argument the
environment is kept or reused; otherwise it is removed. ``CXX`` (g++) compiles the stand-in with the
headers that come with torch. The results do not show a GPU's speed, numbers or driver; see
docs/gpu.md. They are written to benchmarks/results/gpu_stand_in.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).resolve().parent
RESULT = "gpu_stand_in"
ALL_S = 3600.0
if __name__ == "__main__":
    names = ("", "tests", "tests/torch_utils", "benchmarks")
    sys.path[:1] = [str(ROOT / name) for name in names]


def packages_of(folder: Path) -> Path | None:
    """Return the packages folder of an environment, or None if it lacks torch for CUDA."""
    found = sorted(folder.glob("lib/python3*/site-packages/torch/lib/libc10_cuda.so"))
    return found[0].parents[2] if found else None


def headers(packages: Path) -> list[Path]:
    """Return the folders of CUDA's headers; Triton has those that CUDA's packages lack."""
    own = sorted(packages.glob("nvidia/cu13/include/cuda_runtime_api.h"))
    rest = packages / "triton" / "backends" / "nvidia" / "include" / "crt"
    return [own[0].parent, rest.parent] if own and rest.exists() else []


def build(packages: Path, folder: Path) -> Path:
    """Compile the stand-in, and link the driver and NVML to it; return the folder."""
    library = folder / "libstand_in.so"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra"]
    include = [word for path in headers(packages) for word in ("-isystem", str(path))]
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    output = ["-shared", "-fPIC", "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run([*compiler, *include, *sources, *output], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(library.name)
    return folder


def environment(libraries: Path, state: Path) -> dict[str, str]:
    """Return the environment of a program over the stand-in.

    ``state`` is a new folder for the state of the devices.
    """
    state.mkdir()
    return {
        "LD_PRELOAD": str(libraries / "libstand_in.so"),
        "LD_LIBRARY_PATH": str(libraries),
        "CUDA_STAND_IN": str(state),
        "CUDA_STAND_IN_DEVICES": "2",  # The tests use the first one; nothing may touch the other.
        "HF_HUB_OFFLINE": "1",
    }


def control(name: str, python: Path, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a test with a defect; return whether it failed as expected."""
    from gpu import plain
    from gpu.run import limited, paths
    from gpu.stand_in.controls import CONTROLS

    chosen = CONTROLS[name]
    journal = folder / "journal"
    script = str(SOURCES.relative_to(ROOT) / "controls.py")
    command = [str(python), script, name, str(journal), chosen.test]
    env = {**env, **chosen.env, "PYTHONPATH": paths(folder)}
    limited(command, time.monotonic() + plain.TEST_S, **env)
    test = plain.read(journal).get(chosen.test, {"outcome": "not run", "reason": ""})
    return judge(chosen.test, chosen.says, test)


def judge(name: str, says: str, test: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether a test failed with the expected text; a crash does not count."""
    as_expected = test["outcome"] == "failed" and says in test["reason"]
    found = {"test": name, "must_fail_with": says, "as_expected": as_expected}
    return found if as_expected else {**found, **test}


def last_line(reason: str) -> str:
    """Return the last line of a failure; the others name files of this machine."""
    return (reason.strip().splitlines() or [""])[-1]


def summarise(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each unexpected result, and a summary."""
    tests, controls = result["tests"], result["controls"]
    wrong = [f"failed: {n}: {t['reason']}" for n, t in tests.items() if t["outcome"] == "failed"]
    wrong += [f"did not fail: {n}" for n, c in controls.items() if not c["as_expected"]]
    counts = Counter(test["outcome"] for test in tests.values())
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    failed = sum(c["as_expected"] for c in controls.values())
    return [*wrong, f"{said}; {failed} of {len(controls)} controls have failed, as they must"]


def about(python: Path) -> dict[str, Any]:
    """Describe the machine and the environment, by the Python of the environment."""
    code = "import json; from benchmarks.results_file import machine; print(json.dumps(machine()))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run([python, "-c", code], env=env, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def run_all(python: Path, packages: Path, folder: Path) -> dict[str, Any]:
    """Run the tests and the controls."""
    from gpu.run import on_device
    from gpu.stand_in.controls import CONTROLS

    for name in ("libraries", "tests"):
        (folder / name).mkdir()
    libraries = build(packages, folder / "libraries")
    env = environment(libraries, folder / "state")
    deadline = time.monotonic() + ALL_S
    done = on_device(folder / "tests", "stand-in", deadline, "", python=str(python), env=env)
    controls = {}
    for number, name in enumerate(CONTROLS):
        place = folder / str(number)
        place.mkdir()
        controls[name] = control(name, python, place, environment(libraries, place / "state"))
    tests = {n: {**t, "reason": last_line(t["reason"])} for n, t in done["tests"].items()}
    return {"machine": about(python), "tests": tests, "controls": controls}


def main(kept: str | None = None) -> int:
    """Run the tests and controls, and write the results; return the exit code."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("needs a C++ compiler: g++, or the command in CXX")
        return 1
    from benchmarks.results_file import write
    from support.versions import make_environment

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(kept).absolute() if kept else Path(temporary, "environment")
        if packages_of(folder) is None:
            make_environment("gpu", folder)
        packages = packages_of(folder)
        if packages is None or not headers(packages):
            print(f"{folder} lacks torch for CUDA or its headers")
            return 1
        result = run_all(folder / "bin" / "python", packages, Path(temporary))
    write(RESULT, result)
    print(*summarise(result), sep="\n")
    as_expected = all(each["as_expected"] for each in result["controls"].values())
    failed = any(test["outcome"] == "failed" for test in result["tests"].values())
    return int(failed or not as_expected)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
