"""``python -m torch_utils`` prints what a bug report needs. It creates no device context."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from torch_utils import __version__, get_device_info, memory_snapshot
from torch_utils._report import format_bytes

_NAME = "torch-cleanup"
_SETTINGS = ("MALLOC_", "LD_PRELOAD", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_")


def _other_owners() -> Iterator[str]:
    """Return what else is named torch_utils: other packages, and folders that may hide this one."""
    for name in sorted(set(packages_distributions().get("torch_utils", ())) - {_NAME}):
        yield f"the package {name}, whose files overwrite these; pip uninstall {name}"
    own = Path(__file__).parent
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".").resolve() / "torch_utils"
        if (folder / "__init__.py").is_file() and not folder.samefile(own):
            yield f"the folder {folder}, which hides this one if it is earlier in sys.path"


def _lines() -> Iterator[tuple[str, str]]:
    info, own = get_device_info(), Path(__file__).parent
    yield _NAME, f"{__version__} in {own}"
    yield "python", f"{platform.python_version()} {sys.executable}"
    libc = " ".join(platform.libc_ver())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()} {libc}".strip()
    for other in _other_owners():
        yield "torch_utils is also", other
    torch = sys.modules.get("torch")
    where = f"{info['torch_version']} in {Path(str(torch.__file__)).parent}" if torch else "missing"
    yield "torch", where
    if torch is not None:
        cuda, hip = torch.version.cuda, torch.version.hip
        yield "built for", f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"
    count = f"{info['device_count']} of " if info["device_count"] else ""
    yield "device", f"{count}{info['backend']} ({info['device_name']})"
    yield "resident memory", format_bytes(memory_snapshot().host.rss_bytes)
    found = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS)]
    yield "settings", " ".join(sorted(found)) or "none in the environment"


def main() -> None:
    """Print the lines."""
    for name, text in _lines():
        sys.stdout.write(f"{name}: {text}\n")


if __name__ == "__main__":
    main()
