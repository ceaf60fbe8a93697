"""A model in an RQ worker. In this folder: rq worker --worker-class rq.SimpleWorker

The usual worker forks a process for each job, which would load the model for that job alone.
"""

from model import load_model

from torch_utils import ModelHost

host = ModelHost(load_model, keep_alive="10m")  # closed when the worker ends


def rate(text):  # queue.enqueue("rq_worker.rate", "a text")
    with host.lease() as model:
        return model.friendliness(text)
