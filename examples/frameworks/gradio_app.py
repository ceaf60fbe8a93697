"""A model in a Gradio app: gradio_app.py [PORT]"""

import sys

import gradio as gr
from model import load_model

from torch_utils import ModelHost, exit_on_signals


def rate(text):
    with host.lease(timeout_s=60) as model:  # loads it on first use
        return model.friendliness(text)


if __name__ == "__main__":
    exit_on_signals()  # SIGTERM ends the program normally, like Ctrl-C
    with ModelHost(load_model, keep_alive="10m") as host:
        app = gr.Interface(rate, "text", "number", api_name="rate")
        port = int(sys.argv[1]) if sys.argv[1:] else None
        app.launch(server_name="127.0.0.1", server_port=port)
