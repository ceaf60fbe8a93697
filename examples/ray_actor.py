"""A model in a Ray actor, which releases it when the actor ends normally."""

import ray

from rag_demo import EmbeddingModel


@ray.remote
class Embedder:  # a plain class that holds a resource
    def __init__(self):
        self.model = EmbeddingModel()

    def embed(self, text):
        return self.model.embed_query(text)

    def close(self):
        self.model.close()

    __ray_shutdown__ = close  # Ray calls it when the actor ends normally


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    embedder = Embedder.remote()
    print(ray.get(embedder.embed.remote("What does an actor do?")).shape)
    ray.get(embedder.close.remote())  # or drop the handle: Ray then ends the actor normally
    ray.shutdown()  # kills the remaining actors, which closes nothing
