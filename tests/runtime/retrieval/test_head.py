"""A head's queries, keys and scores against transformers and by hand; its file; and what does not fit."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.config import yarn_frequencies
from ridgeplan.runtime.retrieval.head import (
    KEY,
    Head,
    HeadConfig,
    HeadWeights,
    Rotary,
    load_head,
    probe_of,
    save_head,
)

SHAPE = ModelShape(
    name="m", architecture="llama", layers=2, hidden=32, q_heads=4, kv_heads=2, head_dim=8, intermediate=32, vocab=40,
    max_context=512,
)  # fmt: skip
CONFIG = HeadConfig(model="m", hidden=32, vocab=40, q_heads=4, kv_heads=2, head_dim=8, context=64)


@pytest.fixture
def embedding():
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def head(embedding):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(rows, 32, generator=generator) for rows in (32, 16))
    return Head(CONFIG, HeadWeights(torch.rand(32, generator=generator) + 0.5, q, k, probe_of(embedding)))


def test_queries_and_keys_are_those_of_transformers_attention(head, embedding):
    bound = head.for_model(SHAPE, embedding)
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                      vocab_size=40, rms_norm_eps=CONFIG.norm_eps)  # fmt: skip
    tokens, positions = torch.tensor([3, 1, 39, 7]), torch.tensor([0, 5, 20, 63])
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(32, CONFIG.norm_eps)
    norm.weight.data = head.weights.norm
    normed = norm(embedding[tokens])
    q, k = (
        torch.nn.functional.linear(normed, weight).unflatten(-1, (-1, 8)).transpose(0, 1)[None]
        for weight in (head.weights.q, head.weights.k)
    )
    cos, sin = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)(q, positions[None])
    expected = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    projected = bound.project(tokens, positions, Rotary(CONFIG, 64, torch.device("cpu")))
    for tensor, other in zip(projected, expected, strict=True):
        torch.testing.assert_close(tensor, other[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_yarn_stretches_slow_rotations_and_keeps_fast_ones():
    """Channel 0 turns 10 times over 64 tokens and stays; the last turns less than once and slows down by the factor."""
    plain, unscaled = yarn_frequencies(16, 10000.0, 64, 64)
    stretched, scale = yarn_frequencies(16, 10000.0, 64, 256)
    assert plain == pytest.approx([10000.0 ** (-i / 8) for i in range(8)])
    assert stretched[0] == pytest.approx(plain[0], rel=0.1)
    assert stretched[-1] == pytest.approx(plain[-1] / 4)
    assert (unscaled, scale) == (1.0, pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1))


def test_features_are_the_second_half_of_full_inputs(head, embedding):
    """With the second half of both projections at zero, what comes of the features is not read."""
    full = replace(CONFIG, inputs="full")
    q, k = (torch.cat([tensor, torch.zeros_like(tensor)], dim=1) for tensor in (head.weights.q, head.weights.k))
    weights = replace(head.weights, q=q, k=k, feature_norm=torch.ones(32), fc=torch.randn(32, 96))
    both = Head(full, weights).for_model(SHAPE, embedding)
    tokens, positions, rotary = torch.tensor([3, 4]), torch.tensor([0, 1]), Rotary(CONFIG, 64, torch.device("cpu"))
    halves = head.for_model(SHAPE, embedding).project(tokens, positions, rotary)
    for tensor, other in zip(both.project(tokens, positions, rotary, torch.randn(2, 96)), halves, strict=True):
        torch.testing.assert_close(tensor, other)
    weights.q[:, 32:] = 1.0
    assert not torch.allclose(both.project(tokens, positions, rotary, torch.randn(2, 96))[0], halves[0])


def test_a_file_holds_all_of_a_head(head, embedding, tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(path, replace(head, weights=replace(head.weights, q_bias=torch.ones(32), embedding=embedding)))
    loaded = load_head(path)
    assert loaded.config == CONFIG
    assert torch.equal(loaded.weights.q, head.weights.q)
    assert torch.equal(loaded.weights.q_bias, torch.ones(32))
    assert loaded.weights.k_bias is None
    assert [tensor.name for tensor in tmp_path.iterdir()] == ["head.safetensors"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(3, 32)}, r"q is torch.float32 \[3, 32\]; allowed: floating numbers \[32, 32\]"),
        ({"k": torch.full((16, 32), torch.nan)}, "k holds values that are NaN or infinite"),
        ({"k": torch.zeros(16, 32, dtype=torch.int32)}, r"k is torch.int32 \[16, 32\]"),
        ({"more": torch.zeros(1)}, "it holds 'more'; allowed: norm, q, k"),
        ({"probe": None}, "it lacks probe"),
    ],
)
def test_a_file_is_not_trusted(change, message, head, tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(path, head)
    tensors = {name: value for name, value in vars(head.weights).items() if value is not None} | change
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path, {KEY: json.dumps(vars(CONFIG))})
    with pytest.raises(ModelError, match=message):
        load_head(path)


def test_files_of_another_kind_and_wrong_configurations_are_named(head, tmp_path):
    path = tmp_path / "head.safetensors"
    for metadata, message in (
        ({}, "it is no file of `ridgeplan distill`"),
        ({KEY: json.dumps({**vars(CONFIG), "q_heads": 0})}, "q_heads is 0; allowed: a whole number from 1 to 1024"),
        ({KEY: json.dumps({**vars(CONFIG), "q_heads": 3})}, "3 query heads, 2 KV heads of 8; allowed: a multiple"),
        ({KEY: json.dumps({**vars(CONFIG), "layers": 3})}, "4 query heads for 3 layers; allowed: a multiple"),
        ({KEY: "{"}, "cannot load the retrieval head"),
    ):
        save_file({"norm": torch.ones(32)}, path, metadata)
        with pytest.raises(ModelError, match=message) as raised:
            load_head(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match="cannot load the retrieval head"):
        load_head(tmp_path / "none.safetensors")


def test_a_head_of_another_model_is_refused_and_one_rounded_to_bf16_is_not(head, embedding):
    head.for_model(SHAPE, embedding.bfloat16())
    head = replace(head, config=replace(CONFIG, layers=2))
    head.for_model(SHAPE, embedding)
    for shape, values in (
        (replace(SHAPE, vocab=41), embedding),
        (replace(SHAPE, hidden=64), embedding),
        (replace(SHAPE, q_heads=8, kv_heads=8), embedding),
        (replace(SHAPE, layers=1), embedding),
        (SHAPE, embedding + 0.2),
    ):
        with pytest.raises(ModelError, match=r"^the retrieval head is of 'm', another model; allowed: a head that"):
            head.for_model(shape, values)
