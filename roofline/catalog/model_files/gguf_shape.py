"""The ModelShape that the metadata of a GGUF file describes."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.mistakes import brief
from ridgeplan.roofline.catalog.model_files.gguf_header import GGUFHeader, read_gguf_header
from ridgeplan.roofline.catalog.shapes import BadModelFile, ModelShape
from ridgeplan.roofline.catalog.weight_formats.gguf_types import gguf_bits
from ridgeplan.roofline.catalog.weight_formats.weight_bits import WeightBits, mean_bits

# Mistral models are stored as "llama".
_SUPPORTED = ("llama", "qwen2", "qwen3")
_MATRICES = (
    (re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.weight"), "attention"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight"), "mlp"),
    (re.compile(r"token_embd\.weight"), "embedding"),
    (re.compile(r"output\.weight"), "head"),
)


def shape_from_gguf(path: Path) -> ModelShape:
    """The shape that a GGUF file describes. Raises BadModelFile, one line that names the file."""
    try:
        return shape_of_header(read_gguf_header(path), path)
    except OSError as error:
        raise BadModelFile(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadModelFile(f"{path} is not a usable GGUF file: {error}") from None


def shape_of_header(header: GGUFHeader, path: Path) -> ModelShape:
    """The shape that the header of the file `path` describes. Raises ValueError, one line without the path."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in _SUPPORTED:
        supported = ", ".join(_SUPPORTED)
        raise ValueError(f"architecture {brief(architecture)} is not supported; supported: {supported}")

    def value(key: str, default: object = None) -> Any:
        found = header.metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ValueError(f"{architecture}.{key} is missing")
        return found

    if value("expert_count", 0):
        raise ValueError("mixtures of experts are read from their config.json only")
    heads = value("attention.head_count")
    q_width = _tensor(header, "blk.0.attn_q.weight")[-1]
    window = value("attention.sliding_window", 0) or None
    layers, tied = value("block_count"), "output.weight" not in header.tensors
    bits = weight_bits_of(header)
    return ModelShape(
        name=path.stem,
        architecture=str(architecture),
        layers=layers,
        hidden=value("embedding_length"),
        q_heads=heads,
        kv_heads=value("attention.head_count_kv", heads),
        head_dim=value("attention.key_length", q_width // heads if type(heads) is int and heads else 0),
        intermediate=value("feed_forward_length"),
        vocab=_tensor(header, "token_embd.weight")[-1],
        max_context=value("context_length"),
        tied_embeddings=tied,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        window_tokens=window,
        window_layers=layers if window else 0,
        rope_theta=value("rope.freq_base", 10_000.0),
        rope_original_context=value("rope.scaling.original_context_length", 0) or None,
        weight_bits=bits.tied() if tied else bits,
        source=str(path),
    )


def weight_bits_of(header: GGUFHeader) -> WeightBits:
    """The mean bits per weight of each part's tensors. Raises ValueError for a type that is not known."""

    def matrices() -> Iterator[tuple[str, float, float]]:
        for name, dimensions in header.tensors.items():
            part = next((part for pattern, part in _MATRICES if pattern.fullmatch(name)), None)
            if part and math.prod(dimensions):
                yield part, math.prod(dimensions), gguf_bits(header.types[name])

    return mean_bits(matrices(), "gguf")


def _tensor(header: GGUFHeader, name: str) -> tuple[int, ...]:
    """The dimensions of a matrix, innermost first: [inputs, outputs]."""
    dimensions = header.tensors.get(name, ())
    if len(dimensions) != 2:
        raise ValueError(f"it has no matrix {name}")
    return dimensions
