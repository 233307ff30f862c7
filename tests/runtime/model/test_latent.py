"""Latent attention against transformers, in float32, and what it refuses."""

import pytest
import torch
from tiny_families import LATENT_SIZES

from ridgeplan import runtime
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.model.experts import RoutedMLP

NEW = 8
DEVICE = Device(memory_bytes=10**12, element_bytes=4, num_sms=1, asynchronous=0)


@pytest.fixture(scope="module")
def prompt(prompts):
    return prompts(70)[0]


@pytest.mark.parametrize("family", LATENT_SIZES)
def test_logits_and_greedy_tokens_equal_transformers(family, tiny_model, make_plan, prompt):
    model, tokens = tiny_model(family), list(prompt)
    for _ in range(NEW + 1):
        with torch.inference_mode():
            logits = model.reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 :]
        tokens.append(int(logits[-1].argmax()))
    continuation = tokens[len(prompt) : -1]
    engine = runtime.load(make_plan(batch=2), model.folder)
    assert isinstance(engine.weights.layers[1].mlp, RoutedMLP)
    assert (engine.teacher_forced_logits([prompt], [continuation])[0] - logits).abs().max() < 1e-4
    ragged = engine.generate([prompt, prompt[:20]], NEW).tokens
    assert ragged[0] == continuation
    # 4-bit drafts, verified in passes of several queries.
    drafting = runtime.load(make_plan(gamma=3, draft_bits=4, batch=2), model.folder)
    assert drafting.generate([prompt, prompt[:20]], NEW).tokens == ragged


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_weights_and_cache_take_what_is_predicted(bits, tiny_model, make_plan, prompt):
    """Projections from latents are in full precision in every plan, and a token's row has no values beside it."""
    plan = make_plan(target_bits=bits)
    engine = runtime.load(plan, tiny_model("deepseek_v2").folder)
    predicted = predicted_memory(plan, engine.config.shape, DEVICE)
    assert engine.weights.bytes == predicted.weights
    assert engine.cache.bytes == predicted.kv
    assert engine.weights.layers[0].mixer.keys.dtype == torch.float32
    assert len(engine.generate([prompt], NEW).tokens[0]) == NEW


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv": "int8"}, "latent rows as int8 KV"),
        ({"evict": "streamingllm", "budget": 64}, "eviction 'streamingllm' of latent rows"),
        ({"gamma": 2, "selection": "streamingllm"}, "draft selection 'streamingllm' among latent rows"),
    ],
)
def test_what_needs_keys_of_each_head_is_refused(changes, reason, tiny_model, make_plan):
    with pytest.raises(UnsupportedPlan, match=reason) as error:
        runtime.load(make_plan(**changes), tiny_model("deepseek_v2").folder)
    assert "\n" not in str(error.value)
