"""A producer and a worker that embeds its batches, with a heartbeat: embedding_worker.py HOW."""

import queue
import sys
import threading
import time
from dataclasses import dataclass

import torch
from torch import nn

from tests.examples.applications.measure import anonymous_mb, settle, tell
from torch_utils import release

HOW = sys.argv[1]
ROUNDS, ROWS, SIZE = 20, 12_500, 1024  # 50 MB for each batch.
closed: list[str] = []


@dataclass
class Batch:
    """A batch of documents; it stays in the list of the finished batches."""

    number: int
    vectors: torch.Tensor
    mean: float = 0.0


class Embedder(nn.Module):
    def __init__(self, name: str, words: nn.Embedding) -> None:
        super().__init__()
        self.name = name
        self.words = words
        self.scale = nn.Parameter(torch.ones(SIZE))

    @torch.inference_mode()
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words) * self.scale

    def close(self) -> None:
        closed.append(self.name)


def beat(is_over: threading.Event) -> None:
    while not is_over.is_set():
        time.sleep(0.05)


def work(
    embedder: Embedder, todo: "queue.Queue[torch.Tensor | None]", done: "queue.Queue[Batch]"
) -> None:
    for number, words in enumerate(iter(todo.get, None)):
        done.put(Batch(number, embedder(words)))


def main() -> None:
    torch.manual_seed(0)
    words = nn.Embedding(500, SIZE)
    embedder, queries = Embedder("documents", words), Embedder("queries", words)
    documents = [torch.randint(0, 500, (ROWS,)) for _ in range(ROUNDS)]
    expected = [words.weight[each].mean().item() for each in documents]
    question = queries(torch.arange(4)).clone()
    todo: queue.Queue[torch.Tensor | None] = queue.Queue()
    done: queue.Queue[Batch] = queue.Queue()
    is_over = threading.Event()
    threads = [threading.Thread(target=work, args=(embedder, todo, done))]
    if HOW == "heartbeat":
        threads.append(threading.Thread(target=beat, args=(is_over,)))
    for thread in threads:
        thread.start()
    settle()

    finished: list[Batch] = []
    resident_mb: list[float] = []
    for document in documents:
        todo.put(document)
        batch = done.get()
        batch.mean = batch.vectors.mean().item()
        release(batch.vectors)
        finished.append(batch)
        resident_mb.append(anonymous_mb())

    todo.put(None)
    is_over.set()
    for thread in threads:
        thread.join()
    release(embedder)
    tell(
        grown_mb=max(resident_mb) - resident_mb[0],
        left_mb=sum(batch.vectors.nbytes for batch in finished) / 1e6,
        means=[batch.mean for batch in finished] == expected,
        is_right=torch.equal(queries(torch.arange(4)), question),
        closed=closed,
    )


if __name__ == "__main__":
    main()
