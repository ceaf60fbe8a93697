"""A model in Celery's workers. In this folder: celery -A celery_tasks worker"""

from celery import Celery
from celery.signals import worker_process_shutdown

from rag_demo import EmbeddingModel
from torch_utils import ModelHost

app = Celery("celery_tasks", broker="memory://")  # or the one that CELERY_BROKER_URL names


def load_model():
    model = EmbeddingModel()
    model.load_model()
    return model


# Loads nothing yet: each process of the worker is a fork, and loads a model of its own.
host = ModelHost(load_model, keep_alive="10m")


@app.task
def embed(text):
    with host.lease() as model:
        return model.embed_query(text).tolist()


@worker_process_shutdown.connect
def close(**details):
    host.close()  # These processes end without atexit callbacks.
