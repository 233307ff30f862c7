"""A GGUF file is converted once, to a safetensors folder in the user's cache that later loads read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.utils import logging

from ridgeplan.roofline.catalog.gguf_header import read_gguf_header
from ridgeplan.runtime.errors import ModelError

CONVERSION = "1"  # part of the folder's name: a change of what is written makes a new folder


def converted(path: Path) -> Path:
    """The safetensors folder of the GGUF file `path`, converted now if it is not cached yet.

    A folder appears under its name only when it is complete. Raises ModelError for a file that is
    truncated, corrupt or of an architecture that transformers cannot read, and for a cache that cannot be written.
    """
    folder = cache_root() / "models" / _key(path)
    if not folder.is_dir():
        try:
            with _staging(folder) as staging, no_progress_bars():
                _convert(path, staging)
        except OSError as error:
            where = f"{folder.parent}, under $XDG_CACHE_HOME or ~/.cache"
            raise ModelError(f"cannot write the converted model to {where}: {error.strerror or error}") from error
    return folder


def cache_root() -> Path:
    """$XDG_CACHE_HOME/ridgeplan, by default ~/.cache/ridgeplan."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ridgeplan"


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences transformers' progress bars inside the body."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _key(path: Path) -> str:
    """A file's identity without reading it: path, size and modification time."""
    status = path.stat()
    text = f"{CONVERSION}\n{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name on success and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        yield staging
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process finished the same conversion first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert(path: Path, staging: Path) -> None:
    """Writes config, weights and tokenizer; in float32, since dequantized 4-bit values need more than 16 bits."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        read_gguf_header(path)  # raises for counts and sizes that the file does not hold, which the readers follow
        config = transformers.AutoConfig.from_pretrained(**where)
        tensors = _tensors(path, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # the readers unpack whatever the file holds, and a corrupt one fails in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot read the GGUF file {path}: {reason[:200]}") from error
    config.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})


def _tensors(path: Path, config: Any) -> dict[str, torch.Tensor]:
    """The dequantized tensors under transformers' names, which it derives from an empty model."""
    # from_pretrained would do the same conversion, but needs the accelerate package for it.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    return {name: tensor.contiguous() for name, tensor in read["tensors"].items()}
