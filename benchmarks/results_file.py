"""Write a benchmark's raw result, with a description of the machine that made it."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """Describe this machine, as far as figures depend on it."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("torch", "sentence-transformers", "transformers", "accelerate", "faiss-cpu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {' '.join(platform.libc_ver())}",
        "python": sys.version.split()[0],
        "packages": versions,
        "date": date.today().isoformat(),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path
