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
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]


class Service:
    """A running program.

    Attributes:
        process: The program, or clean-exit around it.
        port: The port of the service.
    """

    port: int

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.process: Any = process  # Its streams are pipes.
        self._log = log

    def output(self) -> str:
        """Wait for the end of the program; return its standard error."""
        self.process.wait(120)
        self._log.seek(0)
        return self._log.read()

    def wait_until_held_up(self) -> None:
        assert self.process.stdout.readline() == "held up\n"

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, str]:
        """Send a request over a new connection; return the status and the body."""
        import httpx  # Here, because the program does not need it.

        url = f"http://127.0.0.1:{self.port}{path}"
        method = method or ("GET" if body is None else "POST")
        answer = httpx.request(method, url, json=body, timeout=120)
        return answer.status_code, answer.text

    def ask_json(self, path: str) -> Any:
        """Send a request that must succeed; return its JSON."""
        status, text = self.ask(path)
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

    def search(self, query: str) -> tuple[int, str]:
        """Search by meaning, which needs the model."""
        return self.ask("/search", {"query": query, "mode": "dense"})

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(120))


@contextlib.contextmanager
def service(
    index: Path, *limits: str, under: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[Service]:
    """Start a service; kill it at the end of the block if it still runs."""
    command = [sys.executable, *under, __file__, str(index), *limits]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stderr=log, env=env, **pipes) as process,
    ):
        started = Service(process, log)
        try:
            line = started.process.stdout.readline()
            assert line, started.output()
            started.port = int(line)
            if not (index.parent / "HANGING").exists():
                started.wait_until_ready()
            yield started
        finally:
            process.kill()


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

        in_use = threading.RLock()

        def embed_queries(self, texts: Any) -> Any:
            with self.in_use:
                return super().embed_queries(texts)

        def _release(self) -> None:
            with self.in_use:
                pass

    def load() -> Embedder:
        if Path(index.parent, "BROKEN").exists():
            raise ModelError(f"{index.parent} has no weights")
        model = Model(before)
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
