"""Index a folder, search it, and release everything: `ask_a_folder.py FOLDER QUESTION`."""

import sys
import tempfile
from pathlib import Path

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from rag_demo.reading.sources import Skipped, read_source
from rag_demo.stores.ingest import ingest
from torch_utils import SafePyTorchCleanup

if len(sys.argv) != 3:
    sys.exit(__doc__)
folder, question = sys.argv[1:]
with SafePyTorchCleanup() as scope, tempfile.TemporaryDirectory() as index:
    model = scope.manage(EmbeddingModel())
    skipped = Skipped()
    ingest(read_source(folder, skipped), model, Path(index))  # streamed; continues after Ctrl-C
    retriever = scope.manage(PyTorchGPURetriever(model))
    retriever.load(index)
    for answer in retriever.search(question, top_k=3, mode="hybrid"):
        print(f"{answer.metadata['path']}:{answer.metadata.get('line', 1)}: {answer.text[:80]!r}")
print(scope.report)  # what was freed
