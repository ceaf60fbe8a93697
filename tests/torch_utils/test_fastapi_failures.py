"""What closing a lifespan's scope raises is told once, where somebody sees it."""

from __future__ import annotations

import pytest

from programs import run

FAILING = """
    import asyncio, sys
    from torch_utils import ModelHost, Resource
    from torch_utils.fastapi import lifespan
    {configure}

    class Fails(Resource):
        def _release(self):
            raise OSError("cannot close")

    host = ModelHost(object, name="lent")

    @lifespan(deadline_s=0.5)
    async def models(app, scope):
        {hangs}
        scope.manage(Fails())
        scope.manage(host)
        scope.callback(sys.exit, 3)
        yield

    async def main():
        async with models(None):
            host.load()
            main.lease = host.lease()
            main.lease.__enter__()

    asyncio.run(main())
    main.lease.__exit__(None, None, None)
"""


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_failures_are_told_once_whether_logging_is_configured_or_not(
    configured: bool, hangs: bool
) -> None:
    """uvicorn's root logger has no handler; what hangs afterwards silences nobody."""
    configure = "import logging; logging.basicConfig()" if configured else ""
    wait = "scope.callback(__import__('threading').Event().wait)" if hangs else ""
    done = run(FAILING.format(configure=configure, hangs=wait))
    assert done.returncode == 0, str(done)
    assert done.stderr.count("lent is lent 1 time: taken at ") == 1, str(done)
    assert done.stderr.count("\nOSError: cannot close") == 1, str(done)
    assert done.stderr.count("\nSystemExit: 3") == 1, str(done)
    assert done.stderr.count("Traceback") == 2, str(done)
    assert done.stderr.count("still being closed") == hangs, str(done)
