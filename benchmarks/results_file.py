"""Write the result of a benchmark, with a description of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "sentence-transformers", "transformers", "accelerate", "faiss-cpu")
# torch and oneDNN choose kernels by these; the name of a processor does not tell.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def _cpuinfo() -> dict[str, str]:
    """Return what Linux reports about the first processor."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def machine() -> dict[str, Any]:
    """Describe this machine, as far as figures depend on it."""
    cpu = _cpuinfo()
    flags = cpu.get("flags", "").split()
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {' '.join(platform.libc_ver())}",
        "python": sys.version.split()[0],
        "packages": versions,
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """Return the commit of this checkout, or "unknown"."""
    command = ["git", "-C", str(RESULTS.parent.parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def described(machine: dict[str, Any]) -> str:
    """Return the text about a machine that stands under a table."""
    torch = machine["packages"].get("torch", "none")
    return (
        f"{machine['processor']}, {machine['cores']} cores, "
        f"Python {machine['python']}, torch {torch}"
    )


def write(name: str, result: dict[str, Any]) -> Path:
    """Print a result, and write it into ``results/<name>.json``."""
    print(json.dumps(result, indent=2))
    path = write_into(RESULTS, name, result)
    print(f"measured on: {described(machine())}")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path


def write_into(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write a result with the description of this machine; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({"machine": machine(), **result}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path
