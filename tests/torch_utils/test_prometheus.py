"""Tests of the metrics, also in forked children."""

import json
import re
import textwrap

import pytest

from tests.support.programs import ROOT, assert_clean, run_forked

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

PRELUDE = """
import sys, threading
from contextlib import suppress
import prometheus_client as client
from torch_utils import ModelHost, Resource, find_batch_size, release
from torch_utils.prometheus import register

def value(name, **labels):
    return client.REGISTRY.get_sample_value("torch_utils_" + name, labels)
class Index(Resource):
    def _release(self):
        pass
"""


def program(body: str) -> str:
    """Run a program that must leave cleanly; return its stdout."""
    result = run_forked(PRELUDE + textwrap.dedent(body), quick_end=True)
    assert_clean(result)
    return result.stdout


def test_releases_and_retries_are_counted_and_the_dashboard_shows_every_metric() -> None:
    text = program(
        """
        import numpy, torch
        for _ in range(2):
            register()
            register(client.CollectorRegistry())  # Another one changes nothing here.
        model = torch.nn.Linear(1000, 250, bias=False)
        release(model)
        kept = torch.zeros(250_000)
        view = kept.numpy()
        release([kept])

        @find_batch_size(starting_batch_size=4)
        def embed(batch_size):
            if batch_size > 1:
                raise MemoryError

        embed()
        index = Index()
        sys.stdout.write(client.generate_latest().decode())
        index.close()
        """
    )
    assert 'torch_utils_released_bytes_total{device="host"} 1e+06' in text
    assert 'torch_utils_still_held_bytes{device="host"} 1e+06' in text
    assert "torch_utils_release_duration_seconds_count 2.0" in text
    assert "torch_utils_out_of_memory_retries_total 2.0" in text
    assert 'torch_utils_open_resources{type="Index"} 1.0' in text
    assert "process_resident" in text  # prometheus-client's own, in its words
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [target["expr"].replace("$__rate_interval", "1m") for target in targets]
    asked = set(re.findall(r"\b(torch_utils_\w+?)(?:_total|_bucket)?\b", " ".join(queries)))
    assert asked == set(re.findall(r"^# TYPE (torch_utils_\w+?)(?:_total)? ", text, re.MULTILINE))


def test_loads_unloads_and_leases_are_exported() -> None:
    output = program(
        r"""
        import os, signal, time
        from tests.support.hosted_models import Model
        from torch_utils import ModelPool, ModelProcessError
        register()

        def counts(name):
            reasons = ("requested", "idle", "evicted", "closed", "lost")
            unloads = {r: value("model_unloads_total", model=name, reason=r) for r in reasons}
            return {reason: int(count) for reason, count in unloads.items() if count}

        def fail():
            raise OSError("no such file")

        host = ModelHost(Index, name="one", keep_alive="1ms")
        with host.lease(), host.lease():
            print(value("model_leases", model="one"), value("model_loaded", model="one"))
        while value("model_loaded", model="one"):
            time.sleep(0.01)
        print(value("model_leases", model="one"), counts("one"))
        assert value("model_loads_total", model="one", outcome="success") == 1
        assert value("model_load_duration_seconds_count", model="one") == 1

        broken = ModelHost(fail, name="broken")
        with suppress(OSError):
            broken.load()
        assert value("model_loads_total", model="broken", outcome="error") == 1

        with ModelPool(max_loaded=1) as pool:
            first, second = pool.add("first", Index), pool.add("second", Index)
            for _ in range(2):
                first.load()
                second.load()
                pool.unload("second")
            second.load()
        print(counts("first"), counts("second"))

        # Hosts of one name are added, and labels are valid.
        same, other = (ModelHost(Index, name="\ud800") for _ in range(2))
        with same.lease(), same.lease(), other.lease():
            print(value("model_leases", model=r"\ud800"), value("model_loaded", model=r"\ud800"))
        client.generate_latest()

        with ModelHost(Model, name="dies", isolation="process") as dying:
            with dying.lease() as model, suppress(ModelProcessError):
                os.kill(model.pid(), signal.SIGKILL)
                model.pid()
        print(counts("dies"), value("model_leases", model="dies"))
        """
    )
    assert output.splitlines() == [
        "2.0 1.0",
        "0.0 {'idle': 1}",
        "{'evicted': 2} {'requested': 2, 'closed': 1}",
        "3.0 2.0",
        "{'lost': 1} 0.0",
    ]


def test_asgi_app_serves_each_process_by_itself() -> None:
    """A forked child counts on, although a thread of its parent counts at the fork."""
    output = program(
        """
        import asyncio, os, signal, torch, warnings
        from torch_utils.prometheus import asgi_app
        warnings.filterwarnings("ignore", message=".*multi-threaded")  # From Python 3.12 on.
        app, stop = asgi_app(), threading.Event()

        def scrape():
            sent = []
            async def send(message): sent.append(message)
            async def receive(): return {"type": "http.request"}
            scope = {"type": "http", "headers": [], "query_string": b""}
            asyncio.run(app(scope, receive, send))
            return sent[1]["body"].decode()

        def load(name):
            with ModelHost(Index, name=name) as host:
                host.load()
                return scrape() if name == "own" else ""

        def count():
            while not stop.is_set():
                load("model")

        thread = threading.Thread(target=count)
        thread.start()
        statuses = set()
        for _ in range(10):
            if not (pid := os.fork()):
                signal.alarm(60)
                text = load("own")
                assert 'loads_total{model="own",outcome="success"} 1.0' in text, text
                assert 'model_loaded{model="own"} 1.0' in text, text
                os._exit(0)
            statuses.add(os.waitpid(pid, 0)[1])
        stop.set()
        thread.join()
        print(statuses, 'model="own"' in scrape())
        """
    )
    assert output == "{0} False\n"
