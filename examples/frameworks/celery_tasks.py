"""A model in Celery's workers. In this folder: celery -A celery_tasks worker"""

from celery import Celery
from celery.signals import worker_process_shutdown
from model import load_model

from torch_utils import ModelHost

app = Celery("celery_tasks", broker="memory://")  # or the URL in CELERY_BROKER_URL
# Loads nothing yet. Each process of the worker is a fork and loads its own model.
host = ModelHost(load_model, keep_alive="10m")


@app.task
def rate(text):
    with host.lease() as model:
        return model.friendliness(text)


@worker_process_shutdown.connect
def close(**details):
    host.close()  # Celery's processes end without exit callbacks.
