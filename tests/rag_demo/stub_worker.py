"""What stands in for an encoder in embedding workers: no torch, and troubles on demand."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

DIMENSION = 8


def vectors_of(texts):
    """Tell texts apart, in a way that every process knows."""
    made = np.empty((len(texts), DIMENSION), np.float32)
    for row, text in enumerate(texts):
        made[row] = np.frombuffer(text.encode().ljust(DIMENSION, b".")[:DIMENSION], np.uint8)
    return made


class StubWorker:
    """Takes the place of `rag_demo.encoding.worker_encoder.Worker`."""

    dimension = DIMENSION

    def __init__(self, **options):
        self.options = options
        if options["dtype"] == "bfloat16":
            from rag_demo.errors import ModelError

            raise ModelError("this model cannot be loaded")

    def embed(self, texts, kind, batch_size, many):
        for text in texts:
            what, _, argument = text.partition(" ")
            if what == "exit" and not os.path.exists(argument):
                Path(argument).touch()
                sys.exit(5)
            if what == "sleep" and not os.path.exists(argument):
                Path(argument).touch()
                time.sleep(600)
            if what == "memory" and batch_size > 4:
                raise MemoryError(f"{batch_size} are too many")
            if what == "shape":
                return vectors_of(texts)[:1], 0
            if what == "pid":
                return np.full((len(texts), DIMENSION), os.getpid(), np.float32), 0
        return vectors_of(texts), sum(len(text) > 20 for text in texts)
