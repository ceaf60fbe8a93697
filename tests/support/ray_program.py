"""A program that indexes on Ray with a model that records its releases. Actors import this file."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import rag_demo.ray_embedder as ray_embedder
from rag_demo import Document, ModelIdentity
from rag_demo.stores.ingest import ingest
from tests.support.small_collections import Hashed
from torch_utils import Resource, __version__


class Recorded(Resource):
    """Stands for a model; writes a file when it is loaded and appends to it when it is released."""

    def __init__(self, folder: str, wait_s: float) -> None:
        self.file, self.wait_s = Path(folder, str(os.getpid())), wait_s
        self.file.write_text("")

    def _release(self) -> None:
        with self.file.open("a") as file:
            file.write("released\n")


class RecordingActor(ray_embedder.EmbeddingActor):
    def __init__(self, options: dict[str, Any]) -> None:
        self._model: Any = Recorded(os.environ["RECORDS"], float(os.environ["WAIT_S"]))

    def load(self) -> Any:
        return __version__, ModelIdentity("hashed"), Hashed.dimension

    def embed(self, texts: list[str]) -> Any:
        if texts[0] == "error":
            raise ValueError("this text cannot be embedded")
        time.sleep(self._model.wait_s)
        return Hashed().embed_documents(texts)


class RecordingEmbedder(ray_embedder.RayEmbedder):
    @property
    def identity(self) -> ModelIdentity:
        return ModelIdentity("hashed")


def main() -> None:
    out, address, count, kind = sys.argv[1:5]
    ray_embedder.EmbeddingActor = RecordingActor  # type: ignore[misc]
    texts = [kind if kind == "error" else f"text {n}" for n in range(int(count))]
    documents = (Document(f"d{n}", text, {}) for n, text in enumerate(texts))
    with RecordingEmbedder(address=address or None, actors=2) as embedder:
        done = ingest(documents, embedder, out, on_progress=lambda n: print(n, flush=True))
    print("done", done.embedded, done.reused, flush=True)


if __name__ == "__main__":
    main()
