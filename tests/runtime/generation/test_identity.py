"""Greedy speculative output equals plain decoding with the same target, token by token, in float32."""

import math

import pytest

from ridgeplan import runtime

LENGTHS, NEW = [120, 56, 84], 78  # with groups of 32: three flushes of every row


def generate(plan, folder, prompts, new_tokens=NEW):
    return runtime.load(plan, folder).generate(prompts, new_tokens)


@pytest.mark.parametrize(
    "gamma, batch, agreeable",
    [
        (1, 1, True), (2, 3, True), (4, 3, True), (7, 3, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 3, False), (4, 1, False), (7, 1, True)]),
    ],
)  # fmt: skip
def test_hierarchical_drafts_change_nothing(gamma, batch, agreeable, tiny_model, make_plan, prompts, generated):
    folder = tiny_model(agreeable=agreeable).folder
    ids = prompts(*LENGTHS[:batch])
    plain = generated(make_plan("int4x2", batch=3), folder, ids, NEW)
    drafted = generated(make_plan("int4x2", gamma, batch=3), folder, ids, NEW)
    assert drafted.tokens == plain.tokens
    assert [len(tokens) for tokens in plain.tokens] == [NEW] * batch
    assert plain.statistics.flushes >= 3 * batch
    assert drafted.statistics.flushes >= 3 * batch
    assert len({token for tokens in plain.tokens for token in tokens}) > 5
    if agreeable:
        assert drafted.statistics.acceptance > 0.8
    else:
        assert drafted.statistics.accepted < drafted.statistics.num_draft_tokens_verified


@pytest.mark.parametrize(
    "kv, gamma, codes, draft_bits",
    [
        ("bf16+int4", 4, "upper", 16),
        ("bf16+int4", 3, "upper", 4),
        ("bf16+int4", 2, "full", 16),
        ("bf16", 4, "full", 4),
        ("bf16", 1, "full", 16),
    ],
)
def test_exact_plans_equal_full_precision(kv, gamma, codes, draft_bits, tiny_model, make_plan, prompts, generated):
    folder = tiny_model(agreeable=True).folder
    ids = prompts(*LENGTHS)
    plain = generated(make_plan(batch=3), folder, ids, NEW)
    plan = make_plan(kv, gamma, batch=3, codes=codes, draft_bits=draft_bits)
    drafted = generate(plan, folder, ids)
    assert drafted.tokens == plain.tokens
    if draft_bits == 4:
        assert drafted.statistics.accepted < drafted.statistics.num_draft_tokens_verified
    if codes == "full" and draft_bits == 16:
        assert drafted.statistics.acceptance == 1.0
        # The prompt gives the first token, and the last round is cut where the sequence ends.
        assert drafted.statistics.rounds == math.ceil((len(plain.tokens[0]) - 1) / (gamma + 1))
        assert drafted.statistics.decoded == drafted.statistics.generated - 3


@pytest.mark.parametrize(
    "kv, gamma, codes, draft_bits",
    [
        ("int8", 3, "full", 4),
        ("int4x2", 3, "full", 4),
        ("int4x2", 5, "upper", 4),
        ("int8", 2, "full", 16),
    ],
)
def test_int8_targets_agree_across_formats(kv, gamma, codes, draft_bits, tiny_model, make_plan, prompts, generated):
    folder = tiny_model("qwen3", agreeable=True).folder
    ids = prompts(*LENGTHS)
    plain = generated(make_plan("int8", batch=3), folder, ids, NEW)
    plan = make_plan(kv, gamma, batch=3, codes=codes, draft_bits=draft_bits)
    assert generate(plan, folder, ids).tokens == plain.tokens


@pytest.mark.parametrize("gamma", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_three_queries_a_head_and_larger_groups_change_nothing(gamma, tiny_model, make_plan, prompts):
    """Sizes of real models: three query heads a KV head, heads of 64 channels, groups of 128 tokens."""
    heads = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 64}
    folder, ids, new_tokens = tiny_model(agreeable=True, **heads).folder, prompts(383, 250, 130), 135
    plain, drafted = (
        generate(make_plan("int4x2", each, context=383, new_tokens=135, batch=3, group=128), folder, ids, new_tokens)
        for each in (0, gamma)
    )
    assert drafted.tokens == plain.tokens
    # 383, 250 and 130 tokens become 517, 384 and 264: from 1, 0 and 0 groups of codes to 3, 2 and 1.
    assert drafted.statistics.flushes == plain.statistics.flushes == 5
    assert drafted.statistics.accepted > 0


def test_a_row_generates_what_it_would_alone(tiny_model, make_plan, prompts, generated):
    folder = tiny_model(agreeable=True).folder
    ids = prompts(*LENGTHS)
    plan = make_plan("int4x2", 4, batch=3)
    together = generated(plan, folder, ids, NEW).tokens
    assert together == [generate(plan, folder, [prompt]).tokens[0] for prompt in ids]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97])
def test_prompts_around_the_boundaries(length, tiny_model, make_plan, prompts):
    folder = tiny_model().folder
    ids = prompts(length)
    plain = generate(make_plan("int4x2"), folder, ids, 40)
    assert generate(make_plan("int4x2", 5), folder, ids, 40).tokens == plain.tokens


def test_int8_codes_change_the_target(tiny_model, make_plan, prompts):
    """The identity above compares with the INT8 target, which is a model of its own."""
    folder = tiny_model(initializer_range=0.4).folder
    ids = prompts(*LENGTHS)
    quantized, full = (generate(make_plan(kv, batch=3), folder, ids) for kv in ("int4x2", "bf16"))
    assert quantized.tokens != full.tokens
