"""Load the pytest plugin of torch_utils, unless another package of that name hides it.

pytest loads the plugins of all installed packages. In the folder of a program that has a
``torch_utils`` of its own, such as StyleGAN's, it would end with an error.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch_utils

_PLUGIN = "torch_utils.pytest_plugin"
_is_found = hasattr(torch_utils, "__path__") and find_spec(_PLUGIN) is not None
pytest_plugins = [_PLUGIN] if _is_found else []


def pytest_report_header() -> str:
    """Say what hides the plugin."""
    hidden = f"torch_utils: no plugin, because {torch_utils.__file__} hides torch-cleanup's package"
    return "" if _is_found else hidden
