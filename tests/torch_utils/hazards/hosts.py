"""Hosted models at the end of a program: lent, being loaded, idle, in a process of their own."""

from __future__ import annotations

from tests.torch_utils.hazards.row import Row

_LOADING = """
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
"""
_IN_A_COROUTINE = """
import asyncio
async def main():
    task = asyncio.create_task(x.alease().__aenter__())
    while not begun.is_set():
        await asyncio.sleep(0.01)
asyncio.run(main())
"""
_BLOCKS = {
    "67 a lease that main has not ended": """
        x = make()
        lease = x.lease()
        model = lease.__enter__()
    """,
    "67 a lease that is dropped in a cycle": """
        import gc
        gc.disable()
        x = make()
        lease = x.lease()
        lease.__enter__()
        lease.cycle = lease
        del lease
    """,
    "67 a lease of a daemon thread that never ends it": """
        import threading, time
        x = make()
        lent = threading.Event()
        def work():
            with x.lease():
                lent.set()
                time.sleep(600)
        threading.Thread(target=work, daemon=True).start()
        lent.wait()
    """,
    "68 a load under way in a daemon thread": (
        _LOADING + "threading.Thread(target=x.load, daemon=True).start()\nbegun.wait()"
    ),
    "68 a load that a cancelled coroutine began": _LOADING + _IN_A_COROUTINE,
    "69 a timer that is about to unload": """
        from torch_utils import ModelHost
        class Model:
            def close(self):
                log("released", 1)
        x = ModelHost(Model, keep_alive=0.05)
        x.load()
        log("made", 1)
    """,
    "70 fork, the child lends a model of its own": """
        import os, sys
        x = make()
        if os.fork() == 0:
            def load():
                class Model:
                    def close(self):
                        log("released", 7)
                log("made", 7)
                return Model()
            from torch_utils import ModelHost
            y = ModelHost(load)
            with y.lease():
                sys.exit(0)
        assert os.wait()[1] == 0
    """,
    "71 a process of its own, lent and left open": """
        from tests.torch_utils.hazards.stand_ins import ProcessModel
        from torch_utils import ModelHost
        x = ModelHost(ProcessModel, isolation="process")
        lease = x.lease()
        pid = lease.__enter__().pid()
        log("made", 1)
        import os
        assert pid != os.getpid()
        class Last:
            def __del__(self, _exists=os.path.exists, _log=log, _path=f"/proc/{pid}"):
                if not _exists(_path):
                    _log("released", 1)
        last = Last()
    """,
}

HOSTS = [Row(name, block, subjects=("host",), control=False) for name, block in _BLOCKS.items()]
