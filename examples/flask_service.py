"""A model in a Flask service. In this folder: gunicorn --threads 4 flask_service:app"""

from flask import Flask, request

from rag_demo import EmbeddingModel
from torch_utils import ModelHost


def load_model():
    model = EmbeddingModel()
    model.load_model()
    return model


app = Flask(__name__)
host = ModelHost(load_model, keep_alive="10m")  # loads nothing yet


@app.post("/embed")
def embed():
    with host.lease(timeout_s=60) as model:  # loads it on first use
        return model.embed_documents(request.get_json()).tolist()
