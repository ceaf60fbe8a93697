"""The rest of the matrix: callbacks that fail, torch in odd states, processes and coroutines."""

from __future__ import annotations

from hazards.rows import ENDINGS, ORDER, OURS, PLACES, Row

RAISE = "def fail(): raise {}\n"

CALLBACK = [
    Row("41 raises at exit", RAISE.format("ValueError('no')") + "x = make(fail)"),
    Row(
        "42 raises during gc",
        RAISE.format("ValueError('no')")
        + "import gc; x = make(fail); c = [x]; c.append(c); del x, c; gc.collect()",
    ),
    Row(
        "43 raises SystemExit, others follow",
        RAISE.format("SystemExit(9)") + "x = [make(), make(fail), make()]",
    ),
    Row(
        "43 raises KeyboardInterrupt, others follow",
        RAISE.format("KeyboardInterrupt") + "x = [make(), make(fail), make()]",
    ),
    Row("44 -W error", "x = make()", options=("-W", "error")),
    Row("44 -W error, closed", "x = make(); close(x); del x", options=("-W", "error")),
    Row(
        "45 gc while a lock is held",
        "import gc, logging, threading; logging.basicConfig(level=60); lock = threading.Lock()\n"
        "x = make(); c = [x]; c.append(c); del x, c\n"
        "with lock, logging.getLogger().handlers[0].lock: gc.collect()",
    ),
    Row(
        "46 fails while an exception is in flight",
        RAISE.format("ValueError('cleanup')")
        + "try:\n    with make(fail): raise KeyError('mine')\n"
        "except KeyError as e: assert e.args == ('mine',) and e.__cause__ is None",
        subjects=OURS,
    ),
    Row("47 closed twice", "x = make(); close(x); close(x)", subjects=(*OURS, "naive")),
    Row(
        "47 closed from two threads",
        "import threading, time; x = make(lambda: time.sleep(0.1))\n"
        "ts = [threading.Thread(target=close, args=(x,)) for _ in range(2)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]",
        subjects=(*OURS, "naive"),
    ),
    Row(
        "47 closed by a signal handler",
        "import os, signal; x = make(lambda: os.kill(os.getpid(), signal.SIGUSR1))\n"
        "signal.signal(signal.SIGUSR1, lambda *a: close(x)); close(x)",
        subjects=(*OURS, "naive"),
    ),
    Row("48 closed, then exit", "x = make(); close(x)"),
    Row("48 closed, then dropped", "import gc; x = make(); close(x); del x; gc.collect()"),
]

STAND_IN = """
import sys, types
def boom(*a): raise RuntimeError("driver trouble")
def torch_with(cuda):
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, __version__="0")
"""
CHECKS = """
import torch_utils as t
def check():
    assert t.is_cuda_available() is False and t.get_optimal_device() == "cpu"
    assert t.safe_cuda_empty_cache() is False and not t.get_device_info()["cuda_available"]
check(); x = make(check)
"""
BARE = ("resource", "scope")

TORCH_STATES = [
    Row("49 torch blocked", "import sys; sys.modules['torch'] = None" + CHECKS, subjects=BARE),
    Row(
        "49 torch half-imported",
        STAND_IN + "torch_with(None); spec = types.SimpleNamespace(_initializing=True)\n"
        "sys.modules['torch'].__spec__ = spec" + CHECKS,
        subjects=BARE,
    ),
    Row("49 torch.cuda is None", STAND_IN + "torch_with(None)" + CHECKS, subjects=BARE),
    Row(
        "49 is_available raises",
        STAND_IN
        + "torch_with(types.SimpleNamespace(is_available=boom, is_initialized=boom))"
        + CHECKS,
        subjects=BARE,
    ),
    Row(
        "50 CUDA build without a driver",
        "import torch; torch.version.cuda = '13.0'; torch.cuda._is_compiled = lambda: True"
        + CHECKS,
        needs_torch=True,
        subjects=BARE,
    ),
    Row(
        "51 cleanup imports no torch",
        "import sys\ndef check():\n    assert 'torch' not in sys.modules\nx = make(check)\n"
        "import atexit, torch_utils\natexit.register(torch_utils.safe_cuda_empty_cache)\n"
        "atexit.register(torch_utils.release); atexit.register(check)",
        own_process=True,
        subjects=BARE,
    ),
    Row(
        "51 cleanup initialises no device",
        "import torch\ndef boom(*a): raise SystemExit('a context')\n"
        "torch.cuda._lazy_init = boom; x = make(); close(x); y = make()\n"
        "import atexit, torch_utils as t; t.release(torch.ones(3), collect='full')\n"
        "atexit.register(lambda: t.release(torch.ones(3)))",
        needs_torch=True,
        subjects=("resource", "scope", "retriever"),
    ),
    Row(
        "52 forked child after CUDA was used",
        "import os, sys, torch\ntorch.cuda.is_initialized = lambda: os.getpid() == parent\n"
        "parent = os.getpid(); x = make()\nif os.fork() == 0:\n"
        "    import torch_utils as t\n    assert not t.safe_cuda_empty_cache(); sys.exit(0)\n"
        "assert os.wait()[1] == 0",
        needs_torch=True,
        subjects=("resource", "scope", "retriever"),
    ),
    Row(
        "53 parent checks CUDA, then forks",
        "import os, sys, torch_utils as t; t.is_cuda_available(); x = make()\n"
        "if os.fork() == 0:\n    t.is_cuda_available(); y = make(); sys.exit(0)\n"
        "assert os.wait()[1] == 0",
        needs_torch=True,
        subjects=("resource", "scope", "retriever"),
    ),
    Row(
        "54 tensors of every kind are held",
        "import numpy as np, torch\nx = make(); leaf = torch.ones(9, requires_grad=True)\n"
        "with torch.inference_mode(): inference = torch.ones(9)\n"
        "kept = [leaf, leaf * 2, inference, torch.from_numpy(np.ones(9)),\n"
        "        torch.ones(9).share_memory_(), torch.ones(9)[2:]]\n"
        "import atexit, torch_utils as t; t.release(kept[1:3]); atexit.register(t.release, kept)",
        needs_torch=True,
        subjects=("resource", "scope", "retriever"),
    ),
]

PROCESSES = [
    Row(
        "55 fork, sys.exit in the child",
        "import os, sys; x = make()\nif os.fork() == 0: sys.exit(0)\nassert os.wait()[1] == 0",
    ),
    Row(
        "55 fork, del in the child",
        "import os; x = make()\nif os.fork() == 0:\n    del x; os._exit(0)\n"
        "assert os.wait()[1] == 0",
    ),
    Row(
        "55 fork, the child has its own",
        "import os, sys; x = make()\nif os.fork() == 0:\n    y = make(); sys.exit(0)\n"
        "assert os.wait()[1] == 0",
    ),
    *(
        Row(
            f"56 multiprocessing {method}",
            f"import multiprocessing as mp\ndef work():\n    global y; y = make()\n"
            f"if __name__ == '__main__':\n    x = make(); c = mp.get_context('{method}')\n"
            f"    p = c.Process(target=work); p.start(); p.join(); assert p.exitcode == 0",
            own_process=True,
            subjects=("resource", "scope", "retriever", "naive"),
        )
        for method in ("fork", "forkserver", "spawn")
    ),
    Row(
        "57 pool that nobody closes",
        "import multiprocessing as mp\nif __name__ == '__main__':\n"
        "    x = make(); pool = mp.get_context('fork').Pool(1); pool.map(abs, [1])\n"
        "    pool.terminate()",
        own_process=True,
        subjects=("resource", "scope", "retriever", "naive"),
    ),
    Row(
        "58 DataLoader with persistent workers",
        "import torch; x = make()\n"
        "d = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)\n"
        "list(d)",
        needs_torch=True,
        subjects=("resource", "scope", "retriever", "naive-torch"),
    ),
    Row(
        "59 pending task",
        "import asyncio\nasync def f():\n    x = make(); await asyncio.sleep(100)\n"
        "async def main():\n    global t; t = asyncio.create_task(f()); await asyncio.sleep(0.01)\n"
        "asyncio.run(main())",
    ),
    Row(
        "59 cancelled async with",
        "import asyncio\nasync def f():\n    async with make(): await asyncio.sleep(100)\n"
        "async def main():\n    t = asyncio.create_task(f()); await asyncio.sleep(0.01)\n"
        "    t.cancel(); await asyncio.wait([t])\nasyncio.run(main())",
        subjects=OURS,
    ),
    Row(
        "60 deepcopy and pickle",
        "import copy, pickle; x = make()\nfor f in (copy.copy, copy.deepcopy, pickle.dumps):\n"
        "    try: f(x)\n    except TypeError as e: assert 'cannot' in str(e), e\n"
        "    else: raise AssertionError(f)",
        subjects=("resource", "retriever", "model"),
    ),
]

ROWS = [*PLACES, *ENDINGS, *ORDER, *CALLBACK, *TORCH_STATES, *PROCESSES]
