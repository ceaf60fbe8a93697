"""A model in a Ray actor, which releases it when the actor ends normally."""

import ray

from rag_demo import EmbeddingModel
from torch_utils import Resource


@ray.remote
class Embedder(Resource):
    def __init__(self):
        self.model = EmbeddingModel()

    def embed(self, text):
        self.ensure_open()
        return self.model.embed_query(text)

    def _release(self):  # Ray calls it through __ray_shutdown__
        self.model.close()


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    embedder = Embedder.remote()
    print(ray.get(embedder.embed.remote("What does an actor do?")).shape)
    ray.get(embedder.close.remote())  # or drop the handle: Ray then ends the actor normally
    ray.shutdown()  # kills the remaining actors, which closes nothing
