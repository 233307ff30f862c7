"""Import of an EAGLE-3 draft model as a retrieval head (Li et al. 2025; SpeContext, section 4.1).

Its attention reads the normed embedding of a token beside the normed fused features of the target's last token. The
features do not exist before the target has run, so the head keeps the embedding's half of the projections unless all of
it is asked for (docs/papers.md, SpeContext-8).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeplan.roofline.catalog.files import parse_json, read_document
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.errors import failures_as
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, read_tensors, require_tensor

LAYERS = ("midlayer.", "layers.0.")  # names of the layer in different files
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TRAINED_TOKENS = 2048  # where the configuration does not say
ROPE_THETA = 10000.0


def import_eagle3(path: str | Path, shape: ModelShape, probe: Tensor, inputs: str = "embedding") -> Head:
    """The head of an EAGLE-3 checkpoint, a folder or its safetensors file, for a model of `shape`.

    probe: `probe_of` the model's embedding, which is the checkpoint's where it has none of its own. inputs: "embedding"
    for the half that needs the tokens alone, "full" for all of it. Raises ModelError, one line that names the path.
    """
    with failures_as(f"cannot import the EAGLE-3 checkpoint {brief(str(path))}"):
        folder = Path(path)
        file = folder / WEIGHTS if folder.is_dir() else folder
        described = file.with_name(CONFIG)
        keys = parse_json(read_document(described)) if described.exists() else {}
        if not isinstance(keys, dict):
            raise ValueError(f"{CONFIG} is not a JSON object")
        _, tensors = read_tensors(file)
        return _head(keys, tensors, shape, probe, inputs)


def _head(
    keys: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: ModelShape, probe: Tensor, inputs: str
) -> Head:
    prefix = next((candidate for candidate in LAYERS if f"{candidate}self_attn.q_proj.weight" in tensors), None)
    if prefix is None:
        raise ValueError(f"it has no {LAYERS[0]}self_attn.q_proj.weight")
    config = HeadConfig(
        model=shape.name,
        hidden=shape.hidden,
        vocab=shape.vocab,
        q_heads=_count(keys, "num_attention_heads", shape.q_heads),
        kv_heads=_count(keys, "num_key_value_heads", shape.kv_heads),
        head_dim=_count(keys, "head_dim", shape.head_dim),
        context=_count(keys, "max_position_embeddings", TRAINED_TOKENS),
        rope_theta=float(keys.get("rope_theta") or ROPE_THETA),
        norm_eps=float(keys.get("rms_norm_eps", 1e-5)),
        inputs=inputs,
    )
    hidden, full = config.hidden, inputs == "full"

    def taken(name: str, *size: int) -> Tensor:
        if name not in tensors:
            raise ValueError(f"it lacks {name}")
        require_tensor(name, tensors[name], list(size))
        return tensors[name]

    def projection(name: str, heads: int) -> Tensor:
        weight = taken(f"{prefix}self_attn.{name}.weight", heads * config.head_dim, 2 * hidden)
        return weight[:, : config.width].contiguous()

    weights = HeadWeights(
        norm=taken(f"{prefix}input_layernorm.weight", hidden),
        q=projection("q_proj", config.q_heads),
        k=projection("k_proj", config.kv_heads),
        probe=probe,
        embedding=taken("embed_tokens.weight", shape.vocab, hidden) if "embed_tokens.weight" in tensors else None,
        feature_norm=taken(f"{prefix}hidden_norm.weight", hidden) if full else None,
        fc=taken("fc.weight", hidden, 3 * hidden) if full else None,
    )
    return Head(config, weights)


def _count(keys: Mapping[str, Any], name: str, default: int) -> int:
    value = keys.get(name)
    return default if value is None else value
