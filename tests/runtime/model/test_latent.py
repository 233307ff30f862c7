"""Latent attention against transformers, in float32, and what it refuses."""

import pytest
import torch
from grids import pairs
from tiny_families import LATENT_SIZES

from ridgeplan import runtime
from ridgeplan.kernels.kv_cache.reference import dequantize_keys
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import code_memory
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


@pytest.mark.parametrize("kv", ["int8", "int4x2", "bf16+int4"])
@pytest.mark.parametrize("batch", [1, 3])
def test_latents_as_codes_take_what_is_predicted(kv, batch, tiny_model, make_plan):
    """To the byte, but that all tokens are priced as codes; the last ones, of up to two groups, are not allocated."""
    plan = make_plan(kv, gamma=2, batch=batch, context=300)
    engine = runtime.load(plan, tiny_model("deepseek_v2").folder)
    predicted, codes = predicted_memory(plan, engine.config.shape, DEVICE), engine.cache.codes(0)
    assert (codes.kv_heads, codes.head_dim, codes.has_values) == (1, 32, False)
    recent = 300 + 128 - codes.groups * 32
    spare = code_memory(engine.config.shape, batch, recent, codes.planes, 32)
    assert 0 < recent < 64 and engine.cache.bytes + spare == predicted.kv + predicted.buffers


@pytest.mark.parametrize(
    ("family", "kv", "plain"), pairs([*LATENT_SIZES], [("int4x2", "int8"), ("bf16+int4", "bf16")], always=0)
)
def test_drafts_over_codes_change_no_token(family, kv, plain, tiny_model, make_plan, prompts):
    """Greedy tokens of 4-bit drafts that read upper codes, of one prompt and of several lengths, beyond two flushes."""
    folder, texts = tiny_model(family).folder, prompts(70, 33, 111)
    drafting, undrafted = make_plan(kv, gamma=3, draft_bits=4, batch=3), make_plan(plain, batch=3)
    expected = runtime.load(undrafted, folder).generate(texts, 70).tokens
    engine = runtime.load(drafting, folder)
    assert engine.generate(texts, 70).tokens == expected
    assert engine.generate(texts[:1], 40).tokens == [expected[0][:40]]


def test_old_latents_are_codes_and_rotated_keys_stay(tiny_model, make_plan, prompt):
    """Of the first layer, which reads no cache: after a prompt of one group of codes and flushes of two more."""
    caches, tokens = [], list(prompt) + list(prompt)[:40]
    for kv in ("bf16", "int8"):
        engine = runtime.load(make_plan(kv), tiny_model("deepseek_v2").folder)
        engine.teacher_forced_logits([prompt], [tokens[len(prompt) :]])
        caches.append(engine.cache)
    full, coded = caches
    assert int(coded.lengths[0]) >= 100
    (latents, rotated), (recent, same), codes = full.full(0), coded.full(0), coded.codes(0)
    torch.testing.assert_close(same[0, 0, :100], rotated[0, 0, :100], rtol=0, atol=1e-5)
    old = int(coded.quantized(coded.lengths)[0])
    assert old == 64
    torch.testing.assert_close(recent[0, 0, : 100 - old], latents[0, 0, old:100], rtol=0, atol=1e-5)
    step = codes.key_scale[0, 0, : old // 32].float().repeat_interleave(32, dim=0)
    for lower, share in ((False, 0.5), (True, 1 / 16)):  # residuals of half an upper step are clamped by one more
        error = (dequantize_keys(codes, lower)[0, 0, :old] - latents[0, 0, :old]).abs()
        assert bool((error <= step * share + 1e-2).all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evict": "streamingllm", "budget": 64}, "eviction 'streamingllm' of latent rows"),
        ({"gamma": 2, "selection": "streamingllm"}, "draft selection 'streamingllm' among latent rows"),
    ],
)
def test_what_needs_keys_of_each_head_is_refused(changes, reason, tiny_model, make_plan):
    with pytest.raises(UnsupportedPlan, match=reason) as error:
        runtime.load(make_plan(**changes), tiny_model("deepseek_v2").folder)
    assert "\n" not in str(error.value)
