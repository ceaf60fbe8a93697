"""A model in a Ray actor, which releases it when the actor ends normally."""

import ray
from model import load_model

from torch_utils import release


@ray.remote
class Rater:  # a plain class that holds the model
    def __init__(self):
        self.model = load_model()

    def rate(self, text):
        return self.model.friendliness(text)

    def close(self):
        release(self.model)

    __ray_shutdown__ = close  # Ray calls it when the actor ends normally


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    rater = Rater.remote()
    print(ray.get(rater.rate.remote("Good morning")))
    ray.get(rater.close.remote())  # or drop the handle: Ray then ends the actor normally
    ray.shutdown()  # kills the remaining actors, which closes nothing
