"""Sphinx configuration: `make docs` builds the site into build/docs."""

import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from torch_utils import __version__

project = "torch-cleanup"
copyright = "the authors of torch-cleanup, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 5
suppress_warnings = ["myst.header"]  # The reference has a level for each kind of name.

html_theme = "furo"
smartquotes = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
html_title = "torch-cleanup"
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "default", "github-dark"


def add_contents(app, name, source):
    """Make the sidebar of the lists in index.md, which are plain Markdown."""
    if name != "index":
        return
    for part in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found = re.findall(r"\[([^\]]+)\]\(([\w/-]+)\.md\)", body.replace("`", ""))
        pages = "\n".join(f"{shown} <{page}>" for shown, page in found)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app):
    """Connect the function above."""
    app.connect("source-read", add_contents)
