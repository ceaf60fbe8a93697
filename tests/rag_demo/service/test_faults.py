"""Failures around a service: models, files, disks, and a blocked log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import service_program
from tests.support.programs import TIMEOUT_S
from tests.support.service_program import service
from tests.support.serving import TEXTS, make_index
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow


def test_failing_first_load_ends_the_start(tmp_path: Path) -> None:
    index = make_index(tmp_path / "index")
    (tmp_path / "BROKEN").touch()
    program = [sys.executable, service_program.__file__, str(index)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == f"could not start: {tmp_path} has no weights\n"


_LOGGING = """
import logging
from rag_demo.service.logs import configure_logging
logger = logging.getLogger("rag_demo")
logger.addHandler(logging.StreamHandler())  # as the commands do for warnings
configure_logging("json", "INFO")
logger.warning("the index is damaged")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
"""


def test_log_has_one_writer_of_json() -> None:
    """Clients can cause warnings of uvicorn, which are left out."""
    done = subprocess.run([sys.executable, "-c", _LOGGING], capture_output=True, text=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["message"], line["level"]) == ("the index is damaged", "WARNING")


def test_missing_or_damaged_index_is_found_again(tmp_path: Path) -> None:
    """An open index stays in use, and no response names a folder."""
    index = make_index(tmp_path / "index", [f"{text} {n}" for text in TEXTS for n in range(500)])
    texts: list[str] = []
    with service(index) as started:

        def status_of(*arguments: Any, **more: Any) -> int:
            status, text = started.ask(*arguments, **more)
            texts.append(text)
            return status

        search = {"query": TEXTS[0], "mode": "dense"}
        assert status_of("/search", search) == 200
        shutil.rmtree(index)
        assert status_of("/search", search) == 200
        assert status_of("/admin/reload", method="POST") == 409
        assert status_of("/search", search) == 200
        assert status_of("/admin/models/index/unload", method="POST") == 200
        assert status_of("/search", search) == 503
        assert status_of("/readyz") == 503
        make_index(index, TEXTS)
        wait_for(lambda: status_of("/search", search) == 200)
        assert started.ask_json("/readyz")["documents"] == len(TEXTS)
        for file in index.iterdir():  # Like a broken disk or an incomplete copy.
            os.truncate(file, file.stat().st_size // 2)
        assert status_of("/admin/reload", method="POST") == 409
        assert status_of("/search", search) in (200, 503)
        assert status_of("/livez") == 200
        shutil.rmtree(index)
        make_index(index, TEXTS)
        assert status_of("/admin/reload", method="POST") == 200
        assert status_of("/search", search) == 200
        assert started.stop() == 143
    assert not [text for text in texts if str(tmp_path) in text]
