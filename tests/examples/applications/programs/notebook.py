"""Run the cells of a notebook in a kernel, as Jupyter does, with a model that is reloaded."""

import json
import os
import sys
import tempfile
import time
from typing import Any

from jupyter_client.manager import KernelManager

from tests.examples.applications.measure import tell

SETUP = """
import sys
import torch
from torch import nn
from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import Resource, SafePyTorchCleanup, clear_exception_frames, release

closed = []

class Tagger(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.head = nn.Linear(1024, 8)

    def forward(self, words):
        return self.head(self.embeddings(words))

class Generator(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(15)))

    def forward(self, words):
        return self.layers(self.embeddings(words))

    def close(self):
        closed.append("generator")

class Log(Resource):
    def _release(self):
        tell(log_closed=True)

def load():
    torch.manual_seed(1)
    return Generator(tagger.embeddings).eval()

torch.manual_seed(0)
log = Log()
tagger = Tagger(nn.Embedding(1000, 1024))
words = torch.tensor([3, 1, 4])
settle()
before = anonymous_mb()
"""
LOAD = """
model = load()
weights = Storages(model.layers.parameters())
model
"""
USE = """
with torch.no_grad():
    output = model(words)
print(f"{output.sum().item():.6f}")
"""
WRONG = "model.layers(output.T)"
SHOW = "print(model.layers[0])"  # As the last line of a cell, `Out` would keep it.
RELEASE = """
clear_exception_frames(sys.last_value)
release(model)
"""
SCOPE = """
with SafePyTorchCleanup() as scope:
    model = scope.manage(load())
    weights = Storages(model.layers.parameters())
    with torch.no_grad():
        output = model(words)
    print(f"{output.sum().item():.6f}")
"""
TAG = "tagger(words).tolist()"
MEASURE = "[weights.alive_mb(), anonymous_mb() - before, len(closed)]"


class Notebook:
    def __init__(self) -> None:
        # Over TCP the kernel warns that nothing is encrypted.
        self.manager = KernelManager(kernel_name="python3", transport="ipc")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=600)

    def run(self, source: str, fails: bool = False) -> str:
        """Run a cell and return the text that it shows."""
        shown: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] in ("execute_result", "display_data"):
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "stream":
                shown.append(content["text"])

        reply = self.client.execute_interactive(source, output_hook=collect, timeout=600)
        assert (reply["content"]["status"] == "error") == fails, reply["content"]
        return "".join(shown)

    def shut_down(self) -> int:
        """Shut the kernel down as Jupyter does, but wait for its end without a limit."""
        kernel = self.manager.provisioner.process
        self.client.shutdown()
        while kernel.poll() is None:
            time.sleep(0.05)
        self.client.stop_channels()
        self.manager.cleanup_resources()
        return kernel.returncode


def work(notebook: Notebook, rounds: int) -> None:
    notebook.run(SETUP)
    tags = notebook.run(TAG)
    measured: list[Any] = []
    answers: list[str] = []
    for _ in range(rounds):
        notebook.run(LOAD)
        answers.append(notebook.run(USE))
        notebook.run(SHOW)
        notebook.run(WRONG, fails=True)
        notebook.run(RELEASE)
        measured.append(json.loads(notebook.run(MEASURE)))
        answers.append(notebook.run(SCOPE))
        measured.append(json.loads(notebook.run(MEASURE)))
    tell(measured=measured, answers=answers, is_right=notebook.run(TAG) == tags)


def main() -> None:
    notebook = Notebook()
    try:
        work(notebook, int(sys.argv[1]))
    except BaseException:
        notebook.manager.shutdown_kernel(now=True)
        raise
    tell(exit_code=notebook.shut_down())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = os.environ["IPYTHONDIR"] = folder
        os.chdir(folder)  # The sockets of the kernel have the same names in each folder.
        main()
