"""Tests of the metrics, also in forked workers and in destructors."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from support.programs import Result, assert_clean, run_forked

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

PRELUDE = """
import gc, sys, threading
import prometheus_client as client
from torch_utils import ModelHost, Resource, find_batch_size, release
from torch_utils.prometheus import register

def value(name, **labels):
    return client.REGISTRY.get_sample_value("torch_utils_" + name, labels)

class Index(Resource):
    def _release(self):
        pass
"""


def program(body: str, *arguments: str) -> Result:
    return run_forked(PRELUDE + textwrap.dedent(body), *arguments, quick_end=True)


@pytest.fixture(scope="module")
def exposition() -> str:
    """Return the exposition of a service that has used every metric."""
    done = program(
        """
        import numpy, torch
        register()
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
    assert_clean(done)
    return done.stdout


def test_releases_and_retries_are_counted(exposition: str) -> None:
    text = exposition
    assert 'torch_utils_released_bytes_total{device="host"} 1e+06' in text
    assert 'torch_utils_still_held_bytes{device="host"} 1e+06' in text
    assert "torch_utils_release_duration_seconds_count 2.0" in text
    assert "torch_utils_out_of_memory_retries_total 2.0" in text
    assert 'torch_utils_open_resources{type="Index"} 1.0' in text
    assert "process_resident" in text  # prometheus-client's own, in its words
    assert "torch_utils_process" not in text


def test_promtool_accepts_the_metrics(exposition: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")

    def lint(text: str) -> str:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    assert lint(exposition) == ""
    assert "torch_utils_loads" in lint("# TYPE torch_utils_loads counter\ntorch_utils_loads 1\n")


def test_register_is_idempotent() -> None:
    done = program(
        """
        other = client.CollectorRegistry()
        for _ in range(2):
            register()
            register(other)
        import torch
        release(torch.zeros(10))
        name = "torch_utils_release_duration_seconds_count"
        print(client.REGISTRY.get_sample_value(name), other.get_sample_value(name))
        """
    )
    assert_clean(done)
    assert done.stdout == "1.0 1.0\n"


def test_release_does_not_wait_for_the_metrics_thread() -> None:
    done = program(
        """
        import time, torch
        register()
        for _ in range(20):
            tensor = torch.zeros(10)  # In a variable: a temporary one would go by itself.
            assert release(tensor).freed_bytes == {"host": 40}
            time.sleep(0.01)
        """
    )
    assert_clean(done)


def test_nested_release_is_counted_once() -> None:
    done = program(
        """
        import torch
        register()

        class Model(Resource):
            def _release(self):
                release(self.__dict__.pop("weights"))

        from torch_utils import SafePyTorchCleanup
        with SafePyTorchCleanup() as scope:
            scope.manage(Model()).weights = torch.zeros(250)
        print(value("release_duration_seconds_count"))
        print(value("released_bytes_total", device="host"))
        """
    )
    assert_clean(done)
    assert done.stdout == "1.0\n1000.0\n"


COLLECTED_ANYWHERE = """
    import os, torch
    from support.interrupts import interrupt_everywhere
    register()
    naive = client.Counter("naive", "of a destructor", ["of"])
    places = []

    class Model:
        def __init__(self):
            self.weights, self.cycle = torch.zeros(250), self

        def __del__(self):
            {destructor}

    def work():
        release(torch.zeros(10))
        naive.labels("a").inc()

    def check(place):
        place.run(work)
        places.append(place.delivered)

    def collect():
        Model()
        gc.collect()

    def collect_everywhere():
        how = {{"package": "prometheus_client", "minimum": 50, "deliver": collect}}
        interrupt_everywhere(check, **how, at_most=200)
        gc.collect()
        print(value("release_duration_seconds_count") - 1 - len(places) - sum(places))

    work()
    gc.collect()
    gc.freeze()
    thread = threading.Thread(target=collect_everywhere, daemon=True)
    thread.start()
    count = -1
    while thread.is_alive() and len(places) > count:
        count = len(places)
        thread.join({wait_s})
    print("waits" if thread.is_alive() else "done", flush=True)
    os._exit(0)
"""


def test_destructor_does_not_wait_for_metrics_locks() -> None:
    body = COLLECTED_ANYWHERE.format(destructor="release(self.weights)", wait_s=60)
    done = program(body)
    assert done.stdout == "0.0\ndone\n", str(done)


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, version("prometheus-client").split(".")[:2])) < (0, 22),
    reason="its lock is reentrant: there is nothing to wait for",
)
def test_control_destructor_that_counts_itself_blocks() -> None:
    body = COLLECTED_ANYWHERE.format(destructor="naive.labels('a').inc()", wait_s=1)
    assert program(body).stdout == "waits\n"


def test_loads_unloads_and_leases_are_exported() -> None:
    done = program(
        """
        from torch_utils import ModelHost, ModelPool
        register()
        import torch, time

        def load():
            return torch.nn.Linear(10, 10)

        def fail():
            raise OSError("no such file")

        def unloads(name):
            return {
                reason: int(value("model_unloads_total", model=name, reason=reason) or 0)
                for reason in ("asked", "idle", "room", "closed", "lost")
            }

        host = ModelHost(load, name="one", keep_alive="1ms")
        with host.lease(), host.lease():
            client.generate_latest()
            print(value("model_leases", model="one"), value("model_loaded", model="one"))
        while not value("model_unloads_total", model="one", reason="idle"):
            time.sleep(0.01)
            client.generate_latest()
        print(value("model_leases", model="one"), value("model_loaded", model="one"))
        print(unloads("one"))

        broken = ModelHost(fail, name="broken")
        for _ in range(2):
            try:
                broken.load()
            except OSError:
                pass
        print(value("model_loads_total", model="broken", outcome="error"))
        print(value("model_loads_total", model="one", outcome="success"))
        print(value("model_load_duration_seconds_count", model="one"))

        pool = ModelPool(max_loaded=1)
        first, second = pool.add("first", load), pool.add("second", load)
        first.load()
        second.load()
        print(unloads("first"), value("model_loaded", model="first"))
        pool.unload("second")
        second.load()
        pool.close()
        print(unloads("second"))
        host.close(), broken.close()
        """
    )
    assert_clean(done)
    none = dict.fromkeys(("asked", "idle", "room", "closed", "lost"), 0)
    assert done.stdout.splitlines() == [
        "2.0 1.0",
        "0.0 0.0",
        str(none | {"idle": 1}),
        "2.0",
        "1.0",
        "1.0",
        f"{none | {'room': 1}} 0.0",
        str(none | {"asked": 1, "closed": 1}),
    ]


def test_hosts_of_one_name_are_added_and_labels_are_valid(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os\nclass Model:\n    def die(self):\n        os._exit(3)\n"
    )
    done = program(
        r"""
        from torch_utils import ModelHost, ModelProcessError
        sys.path.insert(0, sys.argv[1])
        import dies
        register()
        one, other = (ModelHost(Index, name="same") for _ in range(2))
        with one.lease(), one.lease():
            with other.lease():
                print(value("model_leases", model="same"))
            print(value("model_leases", model="same"), value("model_loaded", model="same"))
        print(value("model_leases", model="same"))
        one.close(), other.close()

        names = ['a"b', "two\nlines", "\\", "\u6a21", "\ud800", "nul\0"]
        for name in names:
            with ModelHost(Index, name=name) as host:
                host.load()
        client.generate_latest()
        print([value("model_unloads_total", model=n, reason="closed") for n in names[:4]])
        print(value("model_unloads_total", model=r"\ud800", reason="closed"))

        with ModelHost(dies.Model, name="dies", isolation="process") as host:
            with host.lease() as model:
                try:
                    model.die()
                except ModelProcessError:
                    pass
            host.unload()
            print(value("model_unloads_total", model="dies", reason="lost"))
            with host.lease() as model:
                try:
                    model.die()
                except ModelProcessError:
                    pass
                with host.lease():
                    pass
                print(value("model_leases", model="dies"))
        """,
        str(tmp_path),
    )
    assert_clean(done)
    all_closed = str([1.0] * 4)
    assert done.stdout.split("\n") == [
        "3.0",
        "2.0 2.0",
        "0.0",
        all_closed,
        *("1.0", "1.0", "0.0", ""),
    ]


def test_metrics_of_two_workers_are_added(tmp_path: Path) -> None:
    worker = """
        import torch
        register()
        release(torch.zeros(250))
        index = Index()
        release(torch.zeros(250))
        host = ModelHost(Index, name="model")
        host.load()
        client.REGISTRY.get_sample_value("torch_utils_model_loaded", {"model": "model"})
        lease = host.lease()  # Nothing after it is counted.
        lease.__enter__()
        print("ready", file=ready, flush=True)
        go.readline()
        lease.__exit__(None, None, None)
        host.close()
        index.close()
    """
    done = run_forked(
        """
        import os, sys, time

        # Before anything is imported that the workers are to import by themselves.
        pipes = []
        for _ in range(2):
            (answer, ready), (go, ask) = os.pipe(), os.pipe()
            if not os.fork():
                ready, go = os.fdopen(ready, "w"), os.fdopen(go)
                exec(sys.argv[1])
                sys.exit()
            pipes.append((os.fdopen(answer), os.fdopen(ask, "w")))
            os.close(ready), os.close(go)
        print([answer.readline() for answer, _ in pipes])

        import prometheus_client as client
        from prometheus_client.multiprocess import MultiProcessCollector
        registry = client.CollectorRegistry()
        MultiProcessCollector(registry)
        stop = time.monotonic() + 600
        leases = "torch_utils_model_leases", {"model": "model"}
        while registry.get_sample_value(*leases) != 2 and time.monotonic() < stop:
            time.sleep(0.01)
        for name, labels in [
            ("release_duration_seconds_count", {}),
            ("released_bytes_total", {"device": "host"}),
            ("open_resources", {"type": "Index"}),
            ("model_leases", {"model": "model"}),
        ]:
            print(registry.get_sample_value("torch_utils_" + name, labels))
        for _, ask in pipes:
            print("end", file=ask, flush=True)
        print([os.wait()[1] for _ in pipes])
        """,
        PRELUDE + textwrap.dedent(worker),
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        quick_end=True,
    )
    assert_clean(done)
    assert done.stdout.splitlines() == [
        str(["ready\n"] * 2),
        *("4.0", "4000.0", "4.0", "2.0"),
        str([0, 0]),
    ]


def test_asgi_app_drops_gauges_of_dead_workers(tmp_path: Path) -> None:
    worker = """
        from torch_utils import ModelHost
        from torch_utils.prometheus import asgi_app
        app = asgi_app()
        host = ModelHost(Index, name="model")
        host.load()

        def exposition():
            import asyncio
            sent = []
            async def send(message): sent.append(message)
            async def receive(): return {"type": "http.request"}
            scope = {"type": "http", "headers": [], "query_string": b""}
            asyncio.run(app(scope, receive, send))
            return sent[1]["body"].decode()

        def loaded_and_loads(text):
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            loads = 'torch_utils_model_loads_total{model="model",outcome="success"}'
            return values['torch_utils_model_loaded{model="model"}'], values[loads]

        exposition()
        print("ready", file=ready, flush=True)
        go.readline()
        print(*loaded_and_loads(exposition()), file=ready, flush=True)
        go.readline()
        host.close()
    """
    done = run_forked(
        """
        import os, signal, sys
        workers = []
        for _ in range(2):
            (answer, ready), (go, ask) = os.pipe(), os.pipe()
            pid = os.fork()
            if not pid:
                ready, go = os.fdopen(ready, "w"), os.fdopen(go)
                exec(sys.argv[1])
                sys.exit()
            workers.append((pid, os.fdopen(answer), os.fdopen(ask, "w")))
            os.close(ready), os.close(go)
        (killed, answer, _), (pid, living, ask) = workers
        answer.readline(), living.readline()
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        print(file=ask, flush=True)
        print(living.readline().strip())
        print(file=ask, flush=True)
        print(os.waitpid(pid, 0)[1])
        """,
        PRELUDE + textwrap.dedent(worker),
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        quick_end=True,
    )
    assert_clean(done)
    assert done.stdout.splitlines() == ["1.0 2.0", "0"]


def test_prometheus_client_is_imported_only_on_use() -> None:
    done = run_forked(
        """
        import sys
        import torch
        from torch_utils import release
        release(torch.zeros(10))
        assert "prometheus_client" not in sys.modules
        """,
        quick_end=True,
    )
    assert_clean(done)


def test_missing_prometheus_client_is_named() -> None:
    done = run_forked(
        """
        import sys
        sys.modules["prometheus_client"] = None
        try:
            import torch_utils.prometheus
        except ImportError as error:
            print(error)
        """,
        quick_end=True,
    )
    assert "pip install prometheus-client" in done.stdout
