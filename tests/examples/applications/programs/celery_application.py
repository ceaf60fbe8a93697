"""Models in Celery's workers. In this folder: celery -A celery_application worker

As a program of its own it is the client: it sends tasks and prints their results.
"""

import os
import sys
from pathlib import Path

import torch
from celery import Celery
from celery.signals import worker_process_shutdown
from torch import nn

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from tests.examples.applications.models import Ranker, Tagger
from torch_utils import ModelHost

FOLDER = Path(os.environ["CELERY_FOLDER"])
TIMEOUT_S = 600

app = Celery("celery_application", broker="filesystem://", backend=f"file://{FOLDER}/results")
app.conf.broker_transport_options = {
    "data_folder_in": str(FOLDER / "messages"),
    "data_folder_out": str(FOLDER / "messages"),
    "control_folder": str(FOLDER / "control"),
}


facts = {"loaded": 0, "closed": 0}
before: list[float] = []
weights: list[Storages] = []
torch.manual_seed(0)
tagger = Tagger(nn.Embedding(1000, 1024))


def count_close() -> None:
    facts["closed"] += 1
    tell(**{f"closed_{os.getpid()}": facts["closed"]})


def load_ranker() -> Ranker:
    if not before:
        settle()
        before.append(anonymous_mb())
    facts["loaded"] += 1
    tell(**{f"loaded_{os.getpid()}": facts["loaded"]})
    torch.manual_seed(1)
    ranker = Ranker(tagger.embeddings, count_close).eval()
    weights.append(Storages(ranker.layers.parameters()))
    return ranker


# Loads nothing yet. Each process of the worker is a fork and loads its own model.
host = ModelHost(load_ranker, keep_alive="10m")


@app.task
def rank(words):
    with host.lease() as model:
        return model(torch.tensor(words)).tolist()


@app.task
def tag(words):
    return tagger(torch.tensor(words)).tolist()


@app.task
def rank_once(words):
    """Rank with a model that is not kept, and return the memory that remains of it."""
    answer = rank(words)
    host.unload()
    alive = sum(each.alive_mb() for each in weights)
    return {
        "answer": answer,
        "tags": tag(words),
        "alive_mb": alive,
        "grown_mb": anonymous_mb() - before[0],
    }


@worker_process_shutdown.connect
def close(**details):
    host.close()  # Celery's processes end without exit callbacks.


def main() -> None:
    words = [3, 1, 4, 1, 5]
    tags = tag.delay(words).get(timeout=TIMEOUT_S)
    once = [rank_once.delay(words) for _ in range(int(sys.argv[1]))]
    unloaded = [result.get(timeout=TIMEOUT_S) for result in once]
    # Several at once, so that they meet each process of the worker.
    kept = [rank.delay(words) for _ in range(8)]
    answers = [result.get(timeout=TIMEOUT_S) for result in kept]
    tell(tags=tags, unloaded=unloaded, answers=answers)


if __name__ == "__main__":
    main()
