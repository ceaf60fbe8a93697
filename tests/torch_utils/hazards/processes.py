"""Forks, multiprocessing, data loaders, coroutines, and hosted models that are in use."""

from tests.torch_utils.hazards.row import Row

FORK = """
import os, sys
x = make()
if os.fork() == 0:
    y = make()
    del x
    sys.exit(0)
assert os.wait()[1] == 0
"""
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
d = torch.utils.data.DataLoader(
    [1, 2], num_workers=1, persistent_workers=True, multiprocessing_context="fork"
)
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
LEASE = """
import threading, time
x = make()
lent = threading.Event()
def work():
    with x.lease():
        lent.set()
        time.sleep(600)
threading.Thread(target=work, daemon=True).start()
lent.wait()
"""
LOADING = """
import threading
from torch_utils import ModelHost
begun = threading.Event()
class Model:
    def close(self):
        log("released", 1)
def load():
    log("made", 1)
    begun.set()
    threading.main_thread().join(5)  # Until the program ends, if a release does not wait first.
    return Model()
x = ModelHost(load)
threading.Thread(target=x.load, daemon=True).start()
begun.wait()
"""

PROCESSES = [
    Row("fork", FORK),
    *(
        Row(
            f"multiprocessing {method}",
            PROCESS.format(method),
            own_process=True,
            is_variation=method != "fork",
        )
        for method in ("fork", "forkserver", "spawn")
    ),
    Row("pool that nobody closes", POOL, own_process=True, is_variation=True),
    Row("DataLoader that goes on", LOADER, needs_torch=True, control=False, is_variation=True),
    Row("pending task", PENDING),
    Row("lease of a daemon thread that never ends it", LEASE, subjects=("host",), control=False),
    Row("load under way in a daemon thread", LOADING, subjects=("host",), control=False),
]
