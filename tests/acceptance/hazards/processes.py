"""Forks, multiprocessing, data loaders, coroutines and copies."""

from __future__ import annotations

from acceptance.hazards.row import UNLOADED, Row

PROCESSES = [
    Row(
        "55 fork, sys.exit in the child",
        """
        import os, sys
        x = make()
        if os.fork() == 0:
            sys.exit(0)
        assert os.wait()[1] == 0
        """,
    ),
    Row(
        "55 fork, del in the child",
        """
        import os
        x = make()
        if os.fork() == 0:
            del x
            os._exit(0)
        assert os.wait()[1] == 0
        """,
    ),
    Row(
        "55 fork, the child has its own",
        """
        import os, sys
        x = make()
        if os.fork() == 0:
            y = make()
            sys.exit(0)
        assert os.wait()[1] == 0
        """,
    ),
    *(
        Row(
            f"56 multiprocessing {method}",
            f"""
            import multiprocessing as mp
            def work():
                global y
                y = make()
            if __name__ == "__main__":
                x = make()
                c = mp.get_context("{method}")
                p = c.Process(target=work)
                p.start()
                p.join()
                assert p.exitcode == 0
            """,
            own_process=True,
            subjects=UNLOADED,
        )
        for method in ("fork", "forkserver", "spawn")
    ),
    Row(
        "57 pool that nobody closes",
        """
        import multiprocessing as mp
        if __name__ == "__main__":
            x = make()
            pool = mp.get_context("fork").Pool(1)
            pool.map(abs, [1])
            pool.terminate()
        """,
        own_process=True,
        subjects=UNLOADED,
    ),
    Row(
        "58 DataLoader with persistent workers",
        """
        import torch
        x = make()
        d = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
        list(d)
        """,
        needs_torch=True,
        subjects=UNLOADED,
        control=False,
    ),
    Row(
        "59 pending task",
        """
        import asyncio
        async def f():
            x = make()
            await asyncio.sleep(100)
        async def main():
            global t
            t = asyncio.create_task(f())
            await asyncio.sleep(0.01)
        asyncio.run(main())
        """,
    ),
    Row(
        "59 cancelled async with",
        """
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
        """,
        control=False,
    ),
    Row(
        "60 deepcopy and pickle",
        """
        import copy, pickle
        x = make()
        for f in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                f(x)
            except TypeError as e:
                assert "cannot" in str(e), e
            else:
                raise AssertionError(f)
        """,
        subjects=("resource", "retriever", "model"),
        control=False,
    ),
]
