"""Forks, multiprocessing, data loaders, coroutines and copies."""

from __future__ import annotations

from tests.torch_utils.hazards.row import Row

FORK = """
import os, sys
x = make()
if os.fork() == 0:
    {}
assert os.wait()[1] == 0
"""
FORKS = {
    "sys.exit in the child": "sys.exit(0)",
    "del in the child": "del x\n    os._exit(0)",
    "the child has its own": "y = make()\n    sys.exit(0)",
}
PROCESS = """
import multiprocessing as mp
def work():
    global y
    y = make()
if __name__ == "__main__":
    x = make()
    c = mp.get_context("{}")
    p = c.Process(target=work)
    p.start()
    p.join()
    assert p.exitcode == 0
"""
POOL = """
import multiprocessing as mp
if __name__ == "__main__":
    x = make()
    pool = mp.get_context("fork").Pool(1)
    pool.map(abs, [1])
    pool.terminate()
"""
LOADER = """
import torch
x = make()
d = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
list(d)
"""
PENDING = """
import asyncio
async def f():
    x = make()
    await asyncio.sleep(100)
async def main():
    global t
    t = asyncio.create_task(f())
    await asyncio.sleep(0.01)
asyncio.run(main())
"""
CANCELLED = """
import asyncio, contextlib
async def f():
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(make())  # A scope is entered already.
        entered.set()
        await asyncio.sleep(100)
async def main():
    global entered
    entered = asyncio.Event()
    t = asyncio.create_task(f())
    await entered.wait()
    t.cancel()
    await asyncio.wait([t])
asyncio.run(main())
"""
COPIES = """
import copy, pickle
x = make()
for f in (copy.copy, copy.deepcopy, pickle.dumps):
    try:
        f(x)
    except TypeError as e:
        assert "cannot" in str(e), e
    else:
        raise AssertionError(f)
"""
OWN = {"own_process": True}

PROCESSES = [
    *(Row(f"55 fork, {name}", FORK.format(code)) for name, code in FORKS.items()),
    *(
        Row(f"56 multiprocessing {method}", PROCESS.format(method), **OWN)
        for method in ("fork", "forkserver", "spawn")
    ),
    Row("57 pool that nobody closes", POOL, **OWN),
    Row(
        "58 DataLoader with persistent workers",
        LOADER,
        needs_torch=True,
        control=False,
    ),
    Row("59 pending task", PENDING),
    Row("59 cancelled async with", CANCELLED, control=False),
    Row(
        "60 deepcopy and pickle",
        COPIES,
        subjects=("resource", "retriever"),
        control=False,
    ),
]
