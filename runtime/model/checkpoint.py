"""Reading a checkpoint's folder: its configuration, weights and tokenizer. Nothing in it is ever executed."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.readers import failures_as, quiet_rust
from ridgeplan.runtime.model.weights import DecoderWeights, decoder_weights

# Left out, transformers asks on stdin whether a checkpoint's own Python may run.
UNTRUSTED = {"trust_remote_code": False}


def load_config(source: str) -> Any:
    """The transformers configuration in the folder `source`. Raises ModelError."""
    with _reading(source):
        return transformers.AutoConfig.from_pretrained(source, **UNTRUSTED)


def load_weights(source: str, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The decoder's weights in `dtype` on `device`, from safetensors only: pickles are not opened.

    Raises ModelError when any is missing, misshapen or not finite.
    """
    options = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True, **UNTRUSTED}
    with _reading(source):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ModelError(f"the checkpoint {source} lacks {len(missing)} weights, the first is {missing[0]}")
    state = dict(model.state_dict())
    del model
    weights = decoder_weights(shape, state, device)
    if not all(map(_is_finite, weights.tensors())):
        raise ModelError(f"the checkpoint {source} holds weights that are NaN or infinite as {dtype}")
    return weights


def load_tokenizer(source: str) -> Any:
    """The tokenizer in the folder `source`, which has proved that it works. Raises ModelError."""
    with _reading(source), quiet_rust():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **UNTRUSTED)
        tokenizer.decode(tokenizer.encode("It works."))  # transformers takes settings that fail at their first use
    return tokenizer


def checkpoint_elements(source: str) -> int:
    """Elements of all tensors in the folder's safetensors files, from their headers. Raises ModelError."""
    with _reading(source):
        return sum(map(_elements, Path(source).glob("*.safetensors")))


def _elements(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is a number; the extremes tell, without a copy of the tensor."""
    return not tensor.is_floating_point() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _reading(source: str) -> AbstractContextManager[None]:
    return failures_as(f"cannot load the model {source}")
