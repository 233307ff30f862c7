"""Import of EAGLE-3 checkpoints: files of exactly their layout, and what is wrong with others."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.retrieval.eagle3 import import_eagle3

# Llama-3.1-8B's layout with every size divided by 32: hidden 4096, 32 query heads of 128, 8 KV heads.
HIDDEN, QUERIES, KEYS, VOCAB, DRAFT_VOCAB, INNER = 128, 128, 32, 400, 100, 448
SHAPE = ModelShape(
    name="Llama-3.1-8B", architecture="llama", layers=32, hidden=HIDDEN, q_heads=32, kv_heads=8, head_dim=4,
    intermediate=INNER, vocab=VOCAB, max_context=131072,
)  # fmt: skip
PROBE = torch.zeros(16, 8)


def checkpoint(layer="midlayer.", embedding=False):
    """Tensors with the names and shapes of a public checkpoint."""
    sizes = {
        f"{layer}self_attn.q_proj.weight": (QUERIES, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KEYS, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KEYS, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}hidden_norm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        **({"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {}),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    return tensors | {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}


@pytest.fixture
def folder(tmp_path):
    def make(tensors, **config):
        save_file(tensors, tmp_path / "model.safetensors")
        known = {"max_position_embeddings": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}
        (tmp_path / "config.json").write_text(json.dumps(known | config))
        return tmp_path

    return make


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_the_embeddings_half_is_kept(layer, folder):
    tensors = checkpoint(layer)
    head = import_eagle3(folder(tensors), SHAPE, PROBE)
    assert (head.config.context, head.config.rope_theta, head.config.inputs) == (2048, 10000.0, "embedding")
    assert (head.config.q_heads, head.config.kv_heads, head.config.model) == (32, 8, "Llama-3.1-8B")
    assert torch.equal(head.weights.q, tensors[f"{layer}self_attn.q_proj.weight"][:, :HIDDEN])
    assert torch.equal(head.weights.k, tensors[f"{layer}self_attn.k_proj.weight"][:, :HIDDEN])
    assert torch.equal(head.weights.norm, tensors[f"{layer}input_layernorm.weight"])
    assert head.weights.embedding is head.weights.fc is None


def test_all_of_it_may_be_kept(folder):
    tensors = checkpoint(embedding=True)
    head = import_eagle3(folder(tensors, rope_theta=500000) / "model.safetensors", SHAPE, PROBE, "full")
    assert head.weights.q.shape == (QUERIES, 2 * HIDDEN)
    assert head.config.rope_theta == 500000
    assert torch.equal(head.weights.fc, tensors["fc.weight"])
    assert torch.equal(head.weights.feature_norm, tensors["midlayer.hidden_norm.weight"])
    assert torch.equal(head.weights.embedding, tensors["embed_tokens.weight"])


def test_what_does_not_fit_is_named(folder):
    tensors = checkpoint()
    missing = {name: value for name, value in tensors.items() if "k_proj" not in name}
    wide = tensors | {"midlayer.input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.float64)}
    broken = tensors | {"midlayer.input_layernorm.weight": torch.full((HIDDEN,), torch.inf)}
    for content, config, shape, message in (
        (tensors, {}, replace(SHAPE, hidden=256), r"input_layernorm.weight is .*\[128\]; allowed: .* \[256\]"),
        (wide, {}, SHAPE, r"input_layernorm.weight is torch.float64 \[128\]; allowed: .* of 16 or 32 bits"),
        (missing, {}, SHAPE, "it lacks midlayer.self_attn.k_proj.weight"),
        ({"norm.weight": tensors["norm.weight"]}, {}, SHAPE, "it has no midlayer.self_attn.q_proj.weight"),
        (broken, {}, SHAPE, "input_layernorm.weight holds values that are NaN or infinite"),
        (tensors, {"num_attention_heads": "many"}, SHAPE, "q_heads is 'many'; allowed: a whole number"),
    ):
        with pytest.raises(ModelError, match=message) as raised:
            import_eagle3(folder(content, **config), shape, PROBE)
        assert str(raised.value).startswith("cannot import the EAGLE-3 checkpoint")
