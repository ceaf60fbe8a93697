"""Hosted models at the end of a program: lent, and being loaded."""

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
}

HOSTS = [Row(name, block, subjects=("host",), control=False) for name, block in _BLOCKS.items()]
