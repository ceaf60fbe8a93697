"""A model in an RQ worker. In this folder: rq worker --worker-class rq.SimpleWorker

The usual worker forks a process for each job, which would load the model for that job alone.
"""

from rag_demo import EmbeddingModel
from torch_utils import ModelHost


def load_model():
    model = EmbeddingModel()
    model.load_model()
    return model


host = ModelHost(load_model, keep_alive="10m")  # closed when the worker ends


def embed(text):  # queue.enqueue("rq_worker.embed", "a text")
    with host.lease() as model:
        return model.embed_query(text).tolist()
