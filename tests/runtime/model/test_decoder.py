"""Logits of the compact decoder against transformers' own forward pass, in float32."""

import subprocess
import sys

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.kernels.attention import decode_attention
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import causal_attention

TOLERANCE = 1e-3
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"num_attention_heads": 6}),
    "qwen2-half-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "norms-eps": ("qwen3", {"rms_norm_eps": 0.3, "initializer_range": 0.1}),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5e5,
            }
        },
    ),
    "rope-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
}


@torch.inference_mode()
def logits_of(engine, tokens, prompt_tokens, chunk_tokens=2048):
    """Prefill of the first tokens, then one decode step for each of the others: [steps, vocab]."""
    cache = engine.cache
    cache.reset(1)
    ids = torch.tensor(tokens)
    steps = [prefill(engine.decoder, engine.weights, cache, 0, ids[:prompt_tokens], chunk_tokens)]
    for token in ids[prompt_tokens:]:
        logits = engine.decoder.step(
            engine.weights, cache, token.view(1, 1), AttentionMetadataBuilder(cache).target_metadata(1)
        )
        steps.append(logits[0, 0])
        cache.advance(torch.ones(1, dtype=torch.int32))
    return torch.stack(steps)


@torch.inference_mode()
def reference_logits(model, tokens, prompt_tokens):
    return model(torch.tensor([tokens])).logits[0, prompt_tokens - 1 :].float()


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_equal_transformers(name, tiny_model, make_plan, prompts):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    [tokens] = prompts(90)
    engine = runtime.load(make_plan(), model.folder)
    expected = reference_logits(model.reference, tokens, 70)
    assert expected.std() > 0.1
    assert (logits_of(engine, tokens, 70) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 70])
def test_prefill_chunks_change_nothing(name, chunk_tokens, tiny_model, make_plan, prompts):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    [tokens] = prompts(74)
    engine = runtime.load(make_plan(), model.folder)
    actual = logits_of(engine, tokens, 70, chunk_tokens)
    assert (actual - reference_logits(model.reference, tokens, 70)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("length", [64, 70])
def test_padding_changes_nothing(name, length, tiny_model, make_plan, prompts, padded_prompts, poisoned_empty):
    """Prompts of 64 and 96 tokens attend, the latter with 26 of padding."""
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    [tokens] = prompts(length + 4)
    actual = logits_of(runtime.load(make_plan(), model.folder), tokens, length)
    assert (actual - reference_logits(model.reference, tokens, length)).abs().max() < TOLERANCE


def test_prompts_of_many_lengths_attend_as_one(tiny_model, make_plan, prompts, padded_prompts, monkeypatch):
    """cuDNN plans for sizes and strides: those of 65 to 96 tokens are the same."""
    engine, seen = runtime.load(make_plan(), tiny_model("llama").folder), set()

    def attended(q, keys, values, window):
        seen.update((tensor.shape, tensor.stride()) for tensor in (q, keys, values))
        return causal_attention(q, keys, values, window)

    monkeypatch.setattr("ridgeplan.runtime.model.prefill_layer.causal_attention", attended)
    for length in (65, 80, 96):
        logits_of(engine, prompts(length)[0], length)
    # 4 query heads of 32 channels, token after token; 2 KV heads, each with all its tokens together.
    assert seen == {((4, 96, 32), (32, 128, 1)), ((2, 96, 32), (96 * 32, 32, 1))}


def test_a_window_never_begins_before_the_text(tiny_model, make_plan, prompts, monkeypatch):
    engine, seen = runtime.load(make_plan(), tiny_model("mistral", sliding_window=24).folder), []

    def attended(q, keys, values, begin, end, *rest, **options):
        seen.append((int(begin), int(end)))
        return decode_attention(q, keys, values, begin, end, *rest, **options)

    monkeypatch.setattr("ridgeplan.runtime.model.decoder.decode_attention", attended)
    logits_of(engine, prompts(26)[0], 22)
    # 23 to 26 tokens, the new one included, of which 24 are seen; each is forwarded by two layers.
    assert seen[::2] == seen[1::2] == [(0, 23), (0, 24), (1, 25), (2, 26)]


def test_plan_stretches_positions_by_yarn(tiny_model, make_plan, prompts):
    [tokens] = prompts(90)
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}
    stretched = tiny_model("llama", rope_parameters=rope)
    engine = runtime.load(make_plan(yarn_factor=2.0), tiny_model("llama").folder)
    expected = reference_logits(stretched.reference, tokens, 70)
    assert (logits_of(engine, tokens, 70) - expected).abs().max() < TOLERANCE
    plain = reference_logits(tiny_model("llama").reference, tokens, 70)
    assert (expected - plain).abs().max() > 10 * TOLERANCE
    assert engine.config.shape.max_context == 2048


def test_importing_the_decoder_loads_few_modules_and_no_planner():
    code = "import sys, ridgeplan.runtime.model.decoder; print(*(m for m in sys.modules if m.startswith('ridgeplan')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    modules = result.stdout.split()
    assert len(modules) <= 46
    assert not [module for module in modules if module.startswith("ridgeplan.planner")]
