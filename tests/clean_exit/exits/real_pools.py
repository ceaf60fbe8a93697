"""Pools of workers: dask, ray, joblib; those of torch and what stands on it."""

from __future__ import annotations

from typing import Any

from tests.clean_exit.exits.real_programs import PYTHON, Program, dirty

SLOW_SHUTDOWN = {"max_shutdown_s": 30}


def script(group: str, name: str, source: str, *modules: str, **more: Any) -> Program:
    return Program(
        group, name, (PYTHON, "main.py"), {"main.py": source}, modules=modules or (group,), **more
    )


DASK = """
from dask.distributed import Client, LocalCluster

def double(x):
    return 2 * x

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None,
                      host='127.0.0.1') as cluster:
        with Client(cluster) as client:
            assert client.gather(client.map(double, range(4))) == [0, 2, 4, 6]
"""
RAY = """
import ray
for tries_left in reversed(range(5)):
    try:
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000,
                 log_to_driver=False)
        break
    except Exception:  # It gives its own processes 30 s to start, on a busy machine too.
        if not tries_left: raise

@ray.remote
def double(x): return 2 * x

assert ray.get([double.remote(n) for n in range(3)]) == [0, 2, 4]
"""
JOBLIB = """
from joblib import Parallel, delayed

def double(x):
    return 2 * x

if __name__ == "__main__":
    assert Parallel(n_jobs=2)(delayed(double)(n) for n in range(4))[3] == 6
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): return torch.tensor(n)

if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="{method}",
                        persistent_workers=True)
    assert sum(int(batch.sum()) for batch in loader) == 28
"""
GROUP = """
import os
import torch.distributed as dist

def work(rank=None, size=None, port=None):
    if rank is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                          WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    dist.barrier()
    {end}
"""
DESTROY = "dist.destroy_process_group()"
TORCHRUN_MAIN = "\nif __name__ == '__main__':\n    work()\n"
TORCHRUN = ("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
POOL = """
import os
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    model = SentenceTransformer(os.environ["TINY_MODEL"], device="cpu")
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    assert len(model.encode(["a", "b"], pool=pool)) == 2
    {end}
"""
STOP = "model.stop_multi_process_pool(pool)"


def launched(group: str, name: str, command: tuple[str, ...], source: str, **more: Any) -> Program:
    files = {"main.py": source}
    return Program(group, name, (*command, "main.py"), files, modules=("torch",), **more)


POOLS = [
    script("dask", "processes", DASK, "distributed", options=SLOW_SHUTDOWN),
    script("ray", "left-to-atexit", RAY, options=SLOW_SHUTDOWN),
    script("joblib", "loky", JOBLIB),
    *(
        script("DataLoader", method, LOADER.format(method=method), "torch")
        for method in ("fork", "spawn", "forkserver")
        # Abandoned iterators are not among them: torch's handler of SIGCHLD races with the end.
    ),
    launched("torchrun", "destroyed", TORCHRUN, GROUP.format(end=DESTROY) + TORCHRUN_MAIN),
    launched(
        "torchrun",
        "not-destroyed",
        TORCHRUN,
        GROUP.format(end="") + TORCHRUN_MAIN,
        **dirty("process-group-not-destroyed"),
    ),
    script(
        "sentence-transformers",
        "pool-stopped",
        POOL.format(end=STOP),
        "sentence_transformers",
        # It does not wait for the workers that it ends: they may not have come to release theirs.
        **dirty("leaked-semaphore"),
    ),
    script(
        "sentence-transformers",
        "pool-left",
        POOL.format(end="os._exit(0)"),
        "sentence_transformers",
        # Whether their resource tracker still gets to say what it found is its own affair.
        possible=frozenset({"leaked-semaphore"}),
        **dirty("orphan-process"),
    ),
]
