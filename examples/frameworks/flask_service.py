"""A model in a Flask service. In this folder: gunicorn --threads 4 flask_service:app"""

from flask import Flask, request
from model import load_model

from torch_utils import ModelHost

app = Flask(__name__)
host = ModelHost(load_model, keep_alive="10m")  # loads nothing yet


@app.post("/rate")
def rate():
    with host.lease(timeout_s=60) as model:  # loads it on first use
        return [model.friendliness(text) for text in request.get_json()]
