"""Sphinx configuration: `make docs` builds the site into build/docs."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from sphinx.util import inspect

from torch_utils import __version__

project = "torch-cleanup"
copyright = "the authors of torch-cleanup, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
smartquotes = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
html_title = "torch-cleanup"
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "default", "github-dark"

default_role = "py:obj"
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring, napoleon_numpy_docstring = True, False

napoleon_use_ivar = True

# Public names of this project must resolve. Inventories of other projects would be downloads.
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # single backticks in docstrings, which may be any expression
    ("py:.*", r"(?!(torch_utils|clean_exit|rag_demo)\.\w+$).*"),
]


def use_init_signature(app, what, name, obj, options, signature, returns):
    """Show the parameters of ``__init__``; those of ``Resource.__new__`` accept anything."""
    if what == "class" and signature and signature.startswith("(*args"):
        found = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(found, unqualified_typehints=True)
        return signature.removesuffix(" -> None"), returns
    return None


def setup(app):
    """Connect the function above."""
    app.connect("autodoc-process-signature", use_init_signature)
