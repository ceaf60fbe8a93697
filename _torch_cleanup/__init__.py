"""Where the commands and the plug-ins start: a second name for what is installed.

A project may have a folder ``torch_utils`` of its own, and its folder comes first on ``sys.path``.
By this name nothing can stand before the installed one, and nothing of it is ever imported as
``torch_utils`` in a program that means its own. It works because `torch_utils.clean_exit`,
`torch_utils.clean_exit_lint` and `torch_utils.pytest_plugin` import their own by relative names
only. Not for use in programs.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent / "torch_utils")]
