"""Tests of the dashboard's queries with a real Prometheus."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import http
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs import IMPORT_PATH, ROOT

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
VARIABLES = {"$__rate_interval": "1m", "$job": ".*"}

# Does everything that is counted, again and again until its stdin ends.
SERVICE = """
import sys, threading
import prometheus_client as client
import torch
from torch_utils import ModelHost, find_batch_size, memory_snapshot, release
from torch_utils.prometheus import register

register()
class Devices:  # A stand-in for the devices of docs/hosting.md.
    def describe(self):
        return []

    def collect(self):
        name = "torch_utils_device_memory_bytes"
        memory = client.metrics_core.GaugeMetricFamily(name, "stand-in", labels=["device", "kind"])
        for kind in ("allocated", "reserved", "free", "total"):
            memory.add_metric(["cuda:0", kind], 1)
        yield memory

if not memory_snapshot().devices:
    client.REGISTRY.register(Devices())
host = ModelHost(lambda: torch.nn.Linear(100, 100), name="minilm", keep_alive=0)
broken = ModelHost(lambda: 1 / 0, name="broken")

@find_batch_size(starting_batch_size=4)
def embed(batch_size):
    if batch_size > 1:
        raise MemoryError

server, thread = client.start_http_server(0, addr="127.0.0.1")
print(server.server_port, flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.2):
    with host.lease():
        pass
    try:
        broken.load()
    except ZeroDivisionError:
        pass
    kept = torch.zeros(250)
    view = kept.numpy()
    release([kept])
    embed()
"""


def queries() -> dict[str, str]:
    """Return every query of the dashboard with its variables filled in, by panel."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = query
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert metric is not None
            found[f"variable {variable['name']}"] = f"count by ({metric[2]}) ({metric[1]})"
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    """The port of a program that exports its metrics."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
def test_prometheus_answers_every_query(service: int, tmp_path: Path) -> None:
    server = shutil.which("prometheus")
    if server is None:
        pytest.skip("prometheus is not installed: Debian's package prometheus has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs:\n- job_name: models\n  scrape_interval: 1s\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{service}']}}]\n"
    )
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [
            server,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=log,
    )

    def ask(query: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            answer = json.loads(read(url))
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # It listens, no more.
                return []
            pytest.fail(f"{query}: {error.read().decode()}")
        except OSError:  # It does not listen yet.
            assert process.poll() is None, (tmp_path / "log").read_text()
            return []
        values = [one["value"][1] for one in answer["data"]["result"]]
        return [value for value in values if value != "NaN"]

    try:
        # A rate needs two samples that differ.
        while not ask("rate(torch_utils_model_unloads_total[1m]) > 0"):
            time.sleep(0.2)
        unanswered = {name: query for name, query in queries().items() if not ask(query)}
        assert unanswered == {}
        for query in queries().values():  # The control: the metric's name misspelt in each.
            assert ask(re.sub(r"\b(torch_utils|process)_", r"\1s_", query)) == []
    finally:
        process.terminate()
        process.wait(60)
        log.close()
