"""The server as a program, with a small model that can fail and hang.

    python service_program.py INDEX [SETTING=VALUE | LIMIT=VALUE...]

It prints its port. While there is a file BROKEN beside the index, the model cannot be loaded; while
there is a file HANGING, a load never ends. The query "held up" is answered after a line on standard
input, the query "hang" never. Only this module of the tests starts the server.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]


class Service:
    """A running program.

    Attributes:
        process: The program, or clean-exit around it.
        port: The port of the service.
        log: The lines on standard error so far.
    """

    port: int

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def read_port(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.output()
        self.port = int(line)

    def _read(self) -> None:
        if self.process.stderr is not None:
            self.log.extend(self.process.stderr)

    def output(self) -> str:
        """Wait for the end of the program; return its standard error."""
        self.process.wait(120)
        self.reader.join(120)
        return "".join(self.log)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, str]:
        """Send a request over a new connection; return the status and the body."""
        import httpx  # Here, because the program does not need it.

        url = f"http://127.0.0.1:{self.port}{path}"
        method = method or ("GET" if body is None else "POST")
        answer = httpx.request(method, url, json=body, timeout=120)
        return answer.status_code, answer.text

    def ask_json(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send a request that must succeed; return its JSON."""
        status, text = self.ask(path, body, method)
        assert status == 200, (status, text)
        return json.loads(text)

    def is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 120).close()
        except OSError:
            return False
        return True

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded; the port listens before."""
        while self.ask("/readyz")[0] != 200:
            assert self.process.poll() is None, self.output()
            time.sleep(0.01)

    def search(self, query: str, **more: Any) -> tuple[int, str]:
        """Search by meaning, which needs the model."""
        return self.ask("/search", {"query": query, "mode": "dense", **more})

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@contextlib.contextmanager
def service(
    index: Path,
    *limits: str,
    under: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Iterator[Service]:
    """Start a service; kill it at the end of the block if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *under, __file__, str(index), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    started = Service(process)
    try:
        started.read_port()
        if not (index.parent / "HANGING").exists():
            started.wait_until_ready()
        yield started
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(120)
        started.reader.join(120)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def main() -> int:
    from rag_demo.errors import ModelError
    from rag_demo.service.logs import configure_logging
    from rag_demo.service.server import bind, run_server
    from rag_demo.service.settings import Limits, Settings
    from tests.support.serving import Embedder
    from torch_utils import Resource, exit_on_signals

    index = Path(sys.argv[1])
    options: Any = dict(each.split("=") for each in sys.argv[2:])
    names = [name for name in options if name not in Settings.model_fields]
    limits = Limits(**{name: int(options.pop(name)) for name in names})

    def before(texts: list[str]) -> None:
        if "held up" in texts:
            print("held up", flush=True)
            sys.stdin.readline()
        if "hang" in texts:
            threading.Event().wait()

    class Model(Embedder, Resource):
        """Has a lock that its release waits for, as `rag_demo.EmbeddingModel`."""

        def __init__(self) -> None:
            super().__init__(before)
            self.in_use = threading.RLock()

        def embed_queries(self, texts: Any) -> Any:
            with self.in_use:
                return super().embed_queries(texts)

        def _release(self) -> None:
            with self.in_use:
                pass

    def load() -> Embedder:
        if Path(index.parent, "BROKEN").exists():
            raise ModelError(f"{index.parent} has no weights")
        model = Model()
        if Path(index.parent, "HANGING").exists():
            with model.in_use:
                threading.Event().wait()
        return model

    exit_on_signals()
    logging.getLogger("rag_demo").addHandler(logging.StreamHandler())  # As the commands do.
    configure_logging("json", os.environ.get("LEVEL", "WARNING"))
    settings = Settings.read(index=index, port=0, **options)
    listener = bind(settings)
    print(listener.getsockname()[1], flush=True)
    try:
        return 128 + run_server(settings, listener, limits=limits, load_model=load)
    except ModelError as error:
        sys.exit(f"could not start: {error}")  # One line, as the command prints it.


if __name__ == "__main__":
    sys.exit(main())
