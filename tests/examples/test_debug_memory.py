"""The route and the log of examples/frameworks/debug_memory.py show what a service keeps."""

import pytest

from tests.support.programs import ROOT, assert_clean, run

PROGRAM = """
import logging, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from fastapi.testclient import TestClient
import debug_memory
CACHE = {}
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
debug_memory.log.addHandler(handler)
with TestClient(debug_memory.app) as client:
    assert client.get("/debug/memory").status_code == 401
    wrong = {"Authorization": "Bearer other"}
    assert client.get("/debug/memory", headers=wrong).status_code == 401
    CACHE["table"] = torch.ones(1000, 1000)
    answer = client.get("/debug/memory", headers={"Authorization": "Bearer secret"})
    assert "held by the variable 'CACHE' of module __main__: CACHE['table']" in answer.text
    deadline = time.monotonic() + 120
    while not lines and time.monotonic() < deadline:
        time.sleep(0.05)
assert "new memory: 4.0 MB on host" in lines[0] and "CACHE['table']" in lines[0], lines
"""


@pytest.mark.slow
def test_route_and_log_name_what_a_service_keeps() -> None:
    pytest.importorskip("fastapi")
    environment = {"DEBUG_TOKEN": "secret", "DEBUG_MEMORY_EVERY_S": "0.2"}
    folder = str(ROOT / "examples" / "frameworks")
    assert_clean(run(PROGRAM, folder, options=("-W", "ignore"), env=environment))
