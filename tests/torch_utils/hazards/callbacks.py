"""Releases that fail, come twice, or come at a bad moment."""

from __future__ import annotations

from tests.torch_utils.hazards.row import LOUD, Row

FAIL = "def fail():\n    raise {}\n"
IN_A_CYCLE = """
c = [x]
c.append(c)
del x, c
gc.collect()
"""
WITH_A_LOCK = """
import gc, logging, threading
logging.basicConfig(level=60)
lock = threading.Lock()
x = make()
c = [x]
c.append(c)
del x, c
with lock, logging.getLogger().handlers[0].lock:
    gc.collect()
"""
IN_FLIGHT = """
import contextlib
try:
    with contextlib.ExitStack() as stack:
        stack.push(make(fail))  # A scope is entered already.
        raise KeyError("mine")
except KeyError as e:
    assert e.args == ("mine",) and e.__cause__ is None
"""
TWICE = {
    "47 closed twice": """
        x = make()
        close(x)
        close(x)
    """,
    "48 closed, then dropped": """
        import gc
        x = make()
        close(x)
        del x
        gc.collect()
    """,
}
ERROR = FAIL.format("ValueError('no')")
SAYS_ERROR = LOUD.format("ValueError: no")

CALLBACKS = [
    Row("41 raises at exit", ERROR + "x = make(fail)", stderr=SAYS_ERROR),
    Row(
        "42 raises during gc",
        ERROR + "import gc\nx = make(fail)" + IN_A_CYCLE,
        stderr=SAYS_ERROR,
        control=False,
    ),
    *(
        Row(
            f"43 raises {error}, others follow",
            FAIL.format(error) + "x = [make(), make(fail), make()]",
            stderr=f"({LOUD.format(error + ':? ?')})+",  # A host's model is logged too.
        )
        for error in ("SystemExit", "KeyboardInterrupt")
    ),
    Row("44 -W error", "x = make()", options=("-W", "error")),
    Row("45 gc while a lock is held", WITH_A_LOCK, control=False),
    Row(
        "46 fails while an exception is in flight",
        FAIL.format("ValueError('cleanup')") + IN_FLIGHT,
        # The log of a scope or a host, which shows the exception in flight as the context.
        stderr=r"(releasing .* failed: .*\n(.*\n)*ValueError: cleanup\n)?",
        control=False,
    ),
    *(Row(name, block) for name, block in TWICE.items()),
]
