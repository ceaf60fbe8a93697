"""A model in a Streamlit app: streamlit run streamlit_app.py"""

import streamlit as st

from rag_demo import EmbeddingModel
from torch_utils import ModelHost


def load_model():
    model = EmbeddingModel()
    model.load_model()
    return model


@st.cache_resource
def get_host():
    return ModelHost(load_model, keep_alive="10m")  # loads nothing yet


first, second = st.text_input("First", "a cat"), st.text_input("Second", "a kitten")
with get_host().lease(timeout_s=60) as model:  # loads it on first use
    a, b = model.embed_documents([first, second])
st.write(f"similarity: {a @ b:.3f}")
