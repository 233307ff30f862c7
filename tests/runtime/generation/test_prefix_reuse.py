"""A prompt that begins like the text in the cache continues it, as a cache of the same history would."""

import pytest

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import Drafter


@pytest.fixture(scope="module")
def engine_of(tiny_model, make_plan):
    def load(*args, **options):
        return runtime.load(make_plan(*args, context=256, **options), tiny_model(agreeable=True).folder)

    return load


def continued(engine, first, more, new_tokens=12):
    """The tokens of a second turn: the first prompt, its answer, and a message."""
    answer = list(engine.stream(first, 20, reuse_prefix=True))
    assert engine.statistics.reused_tokens == 0
    prompt = [*first, *answer, *more]
    return prompt, list(engine.stream(prompt, new_tokens, reuse_prefix=True)), engine.statistics.reused_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"kv": "bf16"},
        {"kv": "bf16", "gamma": 3, "selection": "specextend", "ratio": 0.3},
        {"kv": "bf16", "gamma": 2, "selection": "snapkv", "ratio": 0.3},
        {"kv": "bf16+int4", "gamma": 3, "selection": "progressive", "ratio": 0.3},
        {"kv": "bf16", "gamma": 3, "drafter": Drafter("suffix", 3, min_match=1)},
    ],
    ids=lambda options: options.get("selection", "suffix" if "drafter" in options else "all"),
)
def test_a_second_turn_of_a_full_cache_equals_one_that_is_read_anew(engine_of, prompts, options):
    engine = engine_of(**options)
    [first], [more] = prompts(130), prompts(9, seed=2)
    prompt, tokens, reused = continued(engine, first, more)
    assert reused >= len(first) + 19  # the answer's last token never entered the cache
    proposals = engine.statistics.proposal_rounds
    assert tokens == list(engine.stream(prompt, 12))
    assert (engine.statistics.reused_tokens, engine.statistics.proposal_rounds) == (0, proposals)


def test_a_quantized_cache_goes_on_as_its_own_decoding_does(engine_of, prompts):
    """The second turn's tokens equal those after the same tokens, forced through the same cache."""
    engine = engine_of("int4x2", 3)
    [first], [more] = prompts(130), prompts(9, seed=2)
    prompt, tokens, reused = continued(engine, first, more)
    assert reused
    forced = engine.teacher_forced_choices([first], [[*prompt[len(first) :], *tokens]])[0].tolist()
    assert forced[len(prompt) - len(first) : -1] == tokens


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"kv": "bf16"}, lambda prompt: [prompt[0] + 1 if prompt[0] < 127 else 0, *prompt[1:]]),
        ({"kv": "int4x2", "gamma": 1}, lambda prompt: prompt[:100]),  # whose end is codes by now
        ({"kv": "bf16", "evict": "h2o", "budget": 64}, lambda prompt: prompt),
    ],
    ids=["another text", "before the last codes", "an eviction"],
)
def test_what_cannot_be_continued_is_read_anew(engine_of, prompts, options, change):
    engine = engine_of(**options)
    [first] = prompts(130)
    answer = list(engine.stream(first, 40, reuse_prefix=True))
    prompt = change([*first, *answer])
    tokens = list(engine.stream(prompt, 8, reuse_prefix=True))
    assert engine.statistics.reused_tokens == 0
    assert tokens == engine.generate([prompt], 8).tokens[0]


def test_an_abandoned_answer_is_continued_up_to_what_was_read(engine_of, prompts):
    engine = engine_of("bf16", 3)
    [first], [more] = prompts(130), prompts(9, seed=2)
    stream = engine.stream(first, 40, reuse_prefix=True)
    answer = [next(stream) for _ in range(10)]
    stream.close()
    prompt = [*first, *answer, *more]
    tokens = list(engine.stream(prompt, 8, reuse_prefix=True))
    assert engine.statistics.reused_tokens >= len(first)
    assert tokens == engine.generate([prompt], 8).tokens[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "int4x2"])
def test_on_a_gpu_a_second_turn_goes_on_with_its_captured_rounds(engine_of, prompts, kv):
    engine = engine_of(kv, 3, group=128, draft_bits=4 if kv == "int4x2" else 16)
    [first], [more] = prompts(130), prompts(9, seed=2)
    prompt, tokens, reused = continued(engine, first, more)
    assert reused >= len(first)
    forced = engine.teacher_forced_choices([first], [[*prompt[len(first) :], *tokens]])[0].tolist()
    agreed = sum(a == b for a, b in zip(forced[len(prompt) - len(first) : -1], tokens, strict=True))
    assert agreed >= len(tokens) - 2  # near ties in bfloat16
