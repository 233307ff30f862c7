"""Files of retrieval heads: safetensors, with the configuration as JSON in their metadata. They are untrusted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ridgeplan.roofline.catalog.checks import build
from ridgeplan.roofline.catalog.documents import parse_json
from ridgeplan.roofline.catalog.mistakes import brief
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.readers import failures_as
from ridgeplan.runtime.retrieval.head import PROBED_CHANNELS, PROBED_TOKENS, Head, HeadConfig, HeadWeights

KEY = "ridgeplan.retrieval_head"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def save_head(path: str | Path, head: Head) -> None:
    """Writes a head's file, completely or not at all. Raises ModelError where it cannot be written."""
    tensors = {name: value.contiguous().cpu() for name, value in vars(head.weights).items() if value is not None}
    write_tensors(Path(path), tensors, {KEY: json.dumps(asdict(head.config))})


def load_head(path: str | Path) -> Head:
    """The head of a file. Raises ModelError, one line that names the file, for anything that is wrong with it."""
    what = f"cannot load the retrieval head {brief(str(path))}"
    with failures_as(what):
        metadata, tensors = read_tensors(Path(path))
        if KEY not in metadata:
            raise ValueError("it is no file of `ridgeplan distill`")
        config = build(HeadConfig, parse_json(metadata[KEY]))
        _require_sizes(config, tensors)
        return Head(config, HeadWeights(**tensors))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, completely or not at all; a link stays one. Raises ModelError."""
    target = Path(os.path.realpath(path))
    staging = target.with_name(f".ridgeplan-{os.getpid()}")
    try:
        staging.write_bytes(save(dict(tensors), dict(metadata)))
        staging.replace(target)
    except OSError as error:
        raise ModelError(f"cannot write {brief(str(path))}: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises OSError, and safetensors' own errors."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}


def sizes_of(config: HeadConfig) -> dict[str, tuple[list[int], bool]]:
    """The size of each tensor of a head, and whether a head of this kind must have it."""
    full, queries, keys = config.inputs == "full", config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "norm": ([config.hidden], True),
        "q": ([queries, config.width], True),
        "k": ([keys, config.width], True),
        "probe": ([PROBED_TOKENS, PROBED_CHANNELS], True),
        "q_bias": ([queries], False),
        "k_bias": ([keys], False),
        "q_norm": ([config.head_dim], False),
        "k_norm": ([config.head_dim], False),
        "embedding": ([config.vocab, config.hidden], False),
        "feature_norm": ([config.hidden], full),
        "fc": ([config.hidden, 3 * config.hidden], full),
    }


def _require_sizes(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for tensors that are missing, unknown, misshapen, of another type or not finite."""
    sizes = sizes_of(config)
    for name in tensors.keys() - sizes.keys():
        raise ValueError(f"it holds {brief(name)}; allowed: {', '.join(sizes)}")
    for name, (size, required) in sizes.items():
        found = tensors.get(name)
        if found is None:
            if required:
                raise ValueError(f"it lacks {name}")
            continue
        if list(found.shape) != size or found.dtype not in DTYPES:
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}; allowed: floating numbers {size}")
        if not torch.stack(torch.aminmax(found.float())).isfinite().all():
            raise ValueError(f"{name} holds values that are NaN or infinite")
