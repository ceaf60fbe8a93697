"""The devices of the tests: a GPU, or a rehearsal in host memory.

A rehearsal runs the same code on CPU tensors. Its memory is the sum of the storages that it created
and that are still alive.
"""

import contextlib
import functools
import gc
import importlib
import os
import re
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import SkipTest

from tests.support import programs
from tests.torch_utils.gpu import driver

MB = 1 << 20


def needs(*packages: str) -> Any:
    """Skip a test where a package is missing."""
    import pytest  # The programs need this module, but not pytest.

    lacking = [name for name in packages if not find_spec(name)]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


class Device:
    """The base of both devices."""

    name: str
    torch_name: str  # torch's name of the device
    place: str  # its name in reports
    backend: str  # of process groups
    model_bytes: int  # the size of a large model
    large_bytes: int  # the size of a large tensor
    limit_s = 600  # for a program that hangs
    skipped: Mapping[str, str] = {}  # tests and files that are meaningless on it, and why

    @staticmethod
    def why_not() -> str | None:
        """Return why the device is missing, or None. Initialises nothing."""
        return None

    @property
    def torch(self) -> Any:
        """The module, which some programs must not import."""
        return importlib.import_module("torch")

    def settle(self) -> None:
        """Drop what earlier tests left, so that values before and after can be compared."""
        gc.collect()

    def model(self, nbytes: int | None = None) -> Any:
        """Return a model of four layers with about ``nbytes`` bytes together."""
        width = int(((nbytes or self.model_bytes) / 16) ** 0.5) // 16 * 16
        layers = [self.torch.nn.Linear(width, width, device=self.torch_name) for _ in range(4)]
        model = self.torch.nn.Sequential(*layers)
        self.watch(*model.parameters())
        return model

    def inputs(self, model: Any, count: int = 8) -> Any:
        """Return a batch for a model that `model` returned."""
        made = self.torch.randn(count, model[0].in_features, device=self.torch_name)
        self.watch(made)
        return made

    def tensor(self, nbytes: int, value: float = 1.0) -> Any:
        """Return a float32 tensor filled with a value."""
        made = self.torch.full((nbytes // 4,), value, device=self.torch_name)
        self.watch(made)
        return made

    def holds(self, tensor: Any, value: float) -> bool:
        """Return whether all values of a tensor equal ``value``."""
        return bool((tensor == value).all())

    def watch(self, *tensors: Any) -> None:
        """Count the memory of tensors, if the device does not."""

    def empty_caches(self) -> None:
        """Return unused memory and the workspaces of cuBLAS, without a garbage collection."""

    def run(self, source: str, *, env: dict[str, str] | None = None) -> programs.Result:
        """Run a program in which ``device`` is defined; torch may be imported already."""
        return programs.run(self.source(source), env=env)

    def source(self, program: str) -> str:
        """Return a program with the lines that define ``device``."""
        kind = type(self).__name__
        # Python 3.12 warns about every fork beside a thread, and CUDA has threads.
        quiet = "import warnings\nwarnings.filterwarnings('ignore', message='.*multi-threaded')\n"
        start = f"{quiet}from {type(self).__module__} import {kind}\ndevice = {kind}()\n"
        return start + textwrap.dedent(program)

    def assert_clean(self, result: programs.Result) -> None:
        """Assert that a program succeeded, and that stderr has only the lines of a bare one."""
        skipped = re.search(r"^(?:\w+\.)*SkipTest: (.*)$", result.stderr, re.MULTILINE)
        if result.returncode and skipped:
            raise SkipTest(skipped[1])
        left = [line for line in result.stderr.splitlines() if line not in self.noise()]
        assert result.returncode == 0 and not left, str(result)

    def noise(self) -> set[str]:
        """Return the lines that torch writes to stderr in a correct program on this machine."""
        return set()


class Cuda(Device):
    """The first GPU."""

    name, torch_name, place, backend = "cuda", "cuda:0", "cuda:0", "nccl"
    model_bytes, large_bytes, limit_s = 1 << 30, 64 * MB, 60  # A GPU is lent for minutes.

    @staticmethod
    def why_not() -> str | None:
        import torch

        from torch_utils import is_cuda_available

        if is_cuda_available():
            return None
        return f"needs a CUDA device, and torch {torch.__version__} finds none"

    def settle(self) -> None:
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)  # It keeps the frames of a failed test.
        gc.collect()
        self.torch.cuda.init()
        self.empty_caches()

    def empty_caches(self) -> None:
        self.synchronize()
        self.torch._C._cuda_clearCublasWorkspaces()
        self.torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        return self.torch.cuda.memory_reserved(0)

    def capacity_bytes(self) -> int:
        """Return the size of the card, or what is left if other processes use it."""
        free, total = self.torch.cuda.mem_get_info(0)
        ours = self.torch.cuda.memory_reserved(0)
        return total if total - free - ours < 2 << 30 else free + ours

    def take(self, nbytes: int) -> Any:
        """Allocate bytes without writing them."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.torch_name)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def pinned(self, nbytes: int) -> Any:
        """Return a page-locked tensor of ones in host memory."""
        return self.torch.ones(nbytes // 4, pin_memory=True)

    def pinned_bytes(self) -> int:
        """Return torch's page-locked memory in bytes, including its cache."""
        stats: dict[str, int] = getattr(self.torch.cuda, "host_memory_stats", dict)()
        for name in ("reserved_bytes.current", "allocated_bytes.current"):
            if name in stats:
                return int(stats[name])
        raise SkipTest(f"torch {self.torch.__version__} does not count page-locked memory")

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[Any]:
        """Run the block on another stream, which first waits for the current one."""
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            yield stream

    def keep_busy(self) -> None:
        """Queue about a quarter of a second of waiting on the current stream."""
        self.torch.cuda._sleep(400_000_000)

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture work as a CUDA graph; return the graph and its output."""
        with self.other_stream() as stream:
            work()
        self.torch.cuda.current_stream().wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        # On the stream of the warm-up, whose cuBLAS workspace the graph uses.
        with self.torch.cuda.graph(graph, stream=stream):
            result = work()
        return graph, result

    def make_context(self) -> None:
        self.torch.zeros(1, device=self.torch_name)

    def has_context(self) -> bool:
        """Return whether this process has called cuInit, or has a context on any device."""
        if driver.is_initialized() or self.bytes_of(os.getpid()):
            return True
        if "torch" not in sys.modules:
            return False
        count = self.torch.cuda.device_count()
        return any(self.torch._C._cuda_hasPrimaryContext(number) for number in range(count))

    def bytes_of(self, pid: int) -> int:
        """Return what the context of a process takes by NVML, with all its memory; 0 without."""
        return driver.bytes_of_processes().get(pid, 0)

    def compiled(self, model: Any) -> Any:
        """Compile a model, with Inductor and CUDA graphs if this machine has Triton.

        Triton compiles C with Python's headers.
        """
        header = Path(sysconfig.get_path("include"), "Python.h")
        has_compiler = header.exists() and any(map(shutil.which, ("gcc", "cc", "clang")))
        if has_compiler and find_spec("triton"):
            return self.torch.compile(model, mode="reduce-overhead")
        return self.torch.compile(model, backend="aot_eager")

    def noise(self) -> set[str]:
        return noise_of_cuda()


@functools.cache
def noise_of_cuda() -> set[str]:
    """Return what a program that only uses CUDA writes to stderr on this machine."""
    bare = programs.run('import torch; torch.ones(8, device="cuda").sum().item()')
    assert bare.returncode == 0, str(bare)
    return set(bare.stderr.splitlines())


class Rehearsal(Device):
    """A device of 64 MB in host memory."""

    name, torch_name, place, backend = "rehearsal", "cpu", "host", "gloo"
    model_bytes, large_bytes = MB, MB
    _CAPACITY, _CONTEXT = 64 * MB, "rehearsed-context"

    def __init__(self) -> None:
        self._watched: list[Any] = []
        self._pinned: list[Any] = []

    def reserved_bytes(self) -> int:
        return self._alive(self._watched)

    def _alive(self, watched: list[Any]) -> int:
        return sum(nbytes for reference, nbytes in watched if not reference.expired())

    def watch(self, *tensors: Any) -> None:
        self._note(self._watched, tensors)

    def _note(self, watched: list[Any], tensors: Any) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = self.torch.multiprocessing.reductions.StorageWeakRef(storage)
            watched.append((reference, storage.nbytes()))

    def capacity_bytes(self) -> int:
        return self._CAPACITY

    def take(self, nbytes: int) -> Any:
        if nbytes > self._CAPACITY - self.reserved_bytes():
            nbytes = 1 << 60  # raises the error of a real allocator
        made = self.torch.empty(nbytes, dtype=self.torch.uint8)
        self.watch(made)
        return made

    def synchronize(self) -> None:
        pass

    def pinned(self, nbytes: int) -> Any:
        made = self.torch.ones(nbytes // 4)
        self._note(self._pinned, [made])
        return made

    def pinned_bytes(self) -> int:
        return self._alive(self._pinned)

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[Any]:
        yield None

    def keep_busy(self) -> None:
        time.sleep(0.001)

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        result = work()
        self.watch(result)
        return _Recorded(work, result), result

    def make_context(self) -> None:
        os.memfd_create(self._CONTEXT)

    def has_context(self) -> bool:
        return bool(self.bytes_of(os.getpid()))

    def bytes_of(self, pid: int) -> int:
        """Return the number of open files that `make_context` made."""
        found = 0
        with contextlib.suppress(OSError):  # The process has ended.
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # The file has been closed.
                    found += self._CONTEXT in os.readlink(link)
        return found

    def compiled(self, model: Any) -> Any:
        return self.torch.compile(model, backend="eager")

    def run(self, source: str, *, env: dict[str, str] | None = None) -> programs.Result:
        return programs.run_forked(self.source(source), env=env)


class _Recorded:
    """A substitute for a captured graph, which does the work again."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work, self._result = work, result

    def replay(self) -> None:
        self._result.copy_(self._work())
