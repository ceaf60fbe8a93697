"""A threaded HTTP server that loads the model of each request and releases it after the answer."""

import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

from applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import Resource, SafePyTorchCleanup, exit_on_signals


class Translator(nn.Module):
    def __init__(self, words: nn.Embedding, language: int) -> None:
        super().__init__()
        self.words = words
        with building:
            torch.manual_seed(language)
            self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(15)))

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids).mean(0))


class Dictionary(nn.Module):
    """Stays loaded, and shares its words with each translator."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 1024)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids).sum(1)


class Journal(Resource):
    """What a request has done; a connection to a database in memory."""

    def __init__(self, name: str) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._name = name

    def _release(self) -> None:
        self._database.close()
        closed.append(self._name)


building = threading.Lock()  # torch has one generator of random numbers.
closed: list[str] = []
weights: list[Storages] = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_POST(self) -> None:
        ids = torch.tensor(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        name = self.path.strip("/")
        if name == "words":
            self.answer(dictionary(ids).tolist())
            return
        with SafePyTorchCleanup() as scope:
            scope.manage(Journal(name))
            model = scope.manage(Translator(dictionary.words, int(name)))
            weights.append(Storages(model.layers.parameters()))
            answer = model(ids).tolist()
        self.answer(answer)

    def do_GET(self) -> None:
        alive_mb = sum(each.alive_mb() for each in weights)
        facts = {"alive_mb": alive_mb, "grown_mb": anonymous_mb() - before, "closed": closed}
        self.answer(facts)

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    exit_on_signals()
    torch.manual_seed(0)
    dictionary = Dictionary()
    settle()
    before = anonymous_mb()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        tell(port=server.server_port)
        server.serve_forever()
