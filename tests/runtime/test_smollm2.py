"""The real SmolLM2-135M-Instruct in float32 on the CPU: identity and acceptance on real text."""

import pytest
import torch

from ridgeplan import runtime

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def real(smollm2, make_plan, long_text):
    """An engine whose weights all tests share, and the text's tokens."""
    engine = runtime.load(make_plan(), str(smollm2), device="cpu", dtype=torch.float32)
    tokens = engine.tokenizer(long_text[30_000:80_000])["input_ids"]
    return engine, tokens


@pytest.fixture(scope="module")
def generate(real, smollm2, make_plan):
    def run(kv, gamma, prompts, new_tokens, **options):
        plan = make_plan(
            kv,
            gamma,
            context=max(map(len, prompts)),
            new_tokens=new_tokens,
            batch=len(prompts),
            group=128,
            draft_bits=options.pop("draft_bits", 16),
            weight_group=64,
        )
        engine = runtime.load(plan, str(smollm2), device="cpu", dtype=torch.float32, weights=real[0].weights)
        return engine.generate(prompts, new_tokens, runtime.SamplingParams(**options))

    return run


def test_speculation_changes_nothing(generate, real):
    prompt = real[1][:600]
    plain = generate("int4x2", 0, [prompt], 80)
    drafted = generate("int4x2", 4, [prompt], 80)
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.flushes == plain.statistics.flushes == 1  # at 640 tokens
    assert drafted.statistics.acceptance > 0.9
    assert len(set(plain.tokens[0])) > 10


def test_shadow_with_int4_weights_is_exact(generate, real):
    prompt = real[1][1000:1500]
    plain = generate("bf16", 0, [prompt], 40)
    drafted = generate("bf16+int4", 3, [prompt], 40, draft_bits=4)
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.acceptance > 0.5


def test_int4_kv_drafts_are_accepted_at_4k(generate, real):
    statistics = generate("int4x2", 4, [real[1][:4096]], 200, temperature=1.0).statistics
    assert statistics.judged >= 150
    assert statistics.acceptance >= 0.93


LENGTHS = {"batch1": (2048,), "ragged3": (2048, 1777, 1300)}


@pytest.fixture(scope="module", params=LENGTHS)
def plain(request, generate, real):
    """Prompts of about 2k tokens, and 400 tokens of plain decoding with the INT8 target."""
    lengths = LENGTHS[request.param]
    prompts = [real[1][start : start + length] for start, length in zip((0, 3000, 6000), lengths, strict=False)]
    generation = generate("int4x2", 0, prompts, 400)
    assert all(len(tokens) == 400 for tokens in generation.tokens)
    assert generation.statistics.flushes >= 3 * len(prompts)
    return prompts, generation


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
def test_400_tokens_after_2k_are_identical_for_every_gamma(gamma, plain, generate):
    prompts, undrafted = plain
    drafted = generate("int4x2", gamma, prompts, 400)
    assert drafted.tokens == undrafted.tokens
    assert drafted.statistics.flushes >= 3 * len(prompts)
