"""A model class of your own: created, used and closed."""

import torch

from rag_demo import PyTorchGPURetriever
from torch_utils import Resource, get_optimal_device, release


class LetterModel(Resource):  # Closed exactly once: by close(), `with` or at exit.
    """Embed a text by its letters, as a placeholder for a real model."""

    dimension = 64

    def __init__(self) -> None:
        self.device = get_optimal_device()
        self.layer = torch.nn.EmbeddingBag(256, self.dimension, mode="sum").to(self.device)

    def embed_documents(self, texts):
        self.ensure_open()  # After close() this raises an error that names the model.
        letters = [torch.tensor(list(text.lower().encode()), device=self.device) for text in texts]
        with torch.inference_mode():
            return torch.stack([self.layer(each[None])[0] for each in letters]).cpu().numpy()

    def embed_query(self, text):
        return self.embed_documents([text])[0]

    def _release(self) -> None:
        release(self.layer)  # Frees the weights, even if variables still refer to the layer.


with LetterModel() as model, PyTorchGPURetriever(model) as retriever:  # opened
    retriever.add(["the capital of France", "a heap of memory"], ids=["france", "heap"])
    print(retriever.search("heaps of memory", top_k=1)[0].id)  # used
print("closed:", model.closed, "and", retriever.closed)  # closed, newest first

forgotten = LetterModel()  # Closed when the program ends.
