"""A model in a Streamlit app: streamlit run streamlit_app.py"""

import streamlit as st
from model import load_model

from torch_utils import ModelHost


@st.cache_resource
def get_host():
    return ModelHost(load_model, keep_alive="10m")  # loads nothing yet


text = st.text_input("Text", "Good morning")
with get_host().lease(timeout_s=60) as model:  # loads it on first use
    st.write(f"friendliness: {model.friendliness(text):.3f}")
