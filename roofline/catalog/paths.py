"""Folders of the user: the cache of this package, and the model cache of Hugging Face."""

import os
from pathlib import Path


class NoHomeFolder(ValueError):
    """A path needs the user's home folder, which the system does not know."""


def home_folder() -> Path:
    """The user's home folder. Raises NoHomeFolder where HOME is unset and the user has no entry in the system."""
    try:
        return Path.home()
    except RuntimeError:
        raise NoHomeFolder(
            "this user has no home folder; allowed: HOME or XDG_CACHE_HOME set to a folder that can be written"
        ) from None


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ridgeplan, by default ~/.cache/ridgeplan. Raises NoHomeFolder."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else home_folder() / ".cache") / "ridgeplan"


def quantized_folder() -> Path:
    """Where quantized weights are saved. Raises NoHomeFolder."""
    return cache_folder() / "quantized"


def hub_folder() -> Path:
    """Where huggingface_hub caches models: $HF_HUB_CACHE, $HF_HOME/hub, or ~/.cache/huggingface/hub."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else home_folder() / ".cache" / "huggingface") / "hub"


def expanded(path: str) -> Path:
    """`path` with a leading ~ or ~user replaced. Raises NoHomeFolder for a user that the system does not know."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise NoHomeFolder(f"the home folder in {path[:80]!r} is not known; allowed: a path without it") from None
