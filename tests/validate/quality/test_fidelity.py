"""Fidelity and perplexity: by hand, on the plain plan, and against acceptance, which is the same figure."""

import math
from types import SimpleNamespace

import pytest
import torch

from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import load
from ridgeplan.validate.acceptance import ROUND, Draft, TeacherForced
from ridgeplan.validate.quality import fidelity as module
from ridgeplan.validate.quality.fidelity import (
    Agreement,
    ForcedPassage,
    agreement,
    next_logits,
    overlap,
    perplexity,
    plan_agreement,
    surprise,
)

CONTEXT, TOKENS = 304, 3 * ROUND
TEXT = torch.randint(256, (CONTEXT + TOKENS + 1,), generator=torch.Generator().manual_seed(0)).tolist()


def test_overlap_is_one_minus_half_the_absolute_difference():
    # p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2): TV 1/4. Then p = q: TV 0. Their mean is 7/8.
    log_p = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    other = torch.log(torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]])) + 3.0
    assert overlap(log_p, other) == pytest.approx(7 / 8)
    assert overlap(log_p, log_p) == pytest.approx(1)
    apart = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    assert overlap(apart[:1], apart[1:]) == pytest.approx(0, abs=1e-6)


def test_perplexity_by_hand():
    # The second token has probability 1/2 after the first, the third 1/8 after the second: (2 * 8) ** (1/2) = 4.
    passage = ForcedPassage((9,), (5, 0, 1))
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.875, 0.125]]))
    assert surprise(logits, passage) == pytest.approx(math.log(4))
    assert perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_passages_end_with_the_tokens_that_are_measured():
    assert ForcedPassage.split([1, 2, 3, 4, 5], 2) == ForcedPassage((1, 2), (3, 4, 5))


@pytest.fixture(scope="module")
def engines(tiny_folder):
    workload = Workload("tiny", "cpu", CONTEXT, TOKENS + 1)
    plain = load(Plan(workload), str(tiny_folder), device="cpu")
    int8 = load(preset("int8", workload), str(tiny_folder), device="cpu", weights=plain.weights)
    return plain, int8


def test_the_plain_plan_is_faithful_to_itself_and_predicts_as_transformers_does(engines, tiny_folder):
    import transformers

    plain, _ = engines
    passage = ForcedPassage.split(TEXT, TOKENS)
    (logits,) = next_logits(plain, [passage])
    assert logits.shape == (TOKENS, 256)
    assert overlap(logits, next_logits(plain, [passage])[0]) == pytest.approx(1, abs=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT])).logits[0].log_softmax(-1)
    nats = [-float(expected[at - 1, TEXT[at]]) for at in range(CONTEXT + 1, CONTEXT + 1 + TOKENS)]
    assert surprise(logits, passage) == pytest.approx(sum(nats) / TOKENS, abs=1e-4)


def test_fidelity_is_the_acceptance_of_the_same_difference(engines):
    plain, int8 = engines
    passage = ForcedPassage.split(TEXT, TOKENS)
    fidelity = overlap(next_logits(plain, [passage])[0], next_logits(int8, [passage])[0])
    (accepted,) = TeacherForced(plain, None, [Draft("kv8")]).run(TEXT[:-1], CONTEXT, lambda done: None)
    assert fidelity == pytest.approx(accepted.mean, abs=1e-5)
    assert 0.5 < fidelity < 1


# An engine's greedy tokens differ from those of its float32 reference only in close calls.

PLAN = preset("int8", Workload("tiny", "cpu", 250, 20))


def test_gaps_beyond_the_noise_are_counted():
    result = Agreement(tokens=100, gaps=(0.1, 0.5, 3.0), noise=0.1)
    assert (result.rate, result.beyond_noise) == (0.03, 1)


def test_two_logits_move_so_the_noise_of_a_gap_is_larger_by_the_root_of_two():
    # Five deviations of the difference of two logits that each move by 0.1: 0.5 * sqrt(2) = 0.7071.
    assert Agreement(tokens=10, gaps=(0.70,), noise=0.1).beyond_noise == 0
    assert Agreement(tokens=10, gaps=(0.71,), noise=0.1).beyond_noise == 1


def test_gaps_are_the_references_and_noise_is_what_is_left_of_a_common_shift():
    exact = torch.tensor([[4.0, 1.0, 0.0], [2.0, 5.0, 1.0], [0.0, 1.5, 3.0]])
    # Shifted as a whole, which changes no token; then one logit moves, and with it the likeliest token of row 2.
    ours = exact + torch.tensor([[7.0], [-2.0], [5.0]])
    ours[2, 1] += 6.0
    logits = {"engine": ours, "reference": exact}
    calls = []

    def fake(name):
        def teacher_forced_logits(prompts, tokens):
            calls.append((name, *prompts, *tokens))
            return logits[name][None]

        generated = SimpleNamespace(tokens=[[0, 1, 1]])
        return SimpleNamespace(
            teacher_forced_logits=teacher_forced_logits, generate=lambda prompt, new_tokens: generated
        )

    result = agreement(fake("engine"), fake("reference"), [8, 9], 3)
    assert calls == [("engine", [8, 9], [0, 1]), ("reference", [8, 9], [0, 1])]
    assert result.tokens == 3
    assert result.gaps == (1.5,)  # of the reference's 3.0 and 1.5; the engine's own gap is 4.5
    # The move of 6 is 4 above its row's mean of 2, its two neighbours 2 below: (16 + 4 + 4) / 8, with 9 - 1 degrees.
    assert result.noise == pytest.approx(3**0.5)


def test_an_engine_agrees_with_itself_and_a_bfloat16_one_is_compared_with_float32(tiny_folder, monkeypatch):
    exact = load(PLAN, str(tiny_folder), device="cpu")
    prompt = list(range(200))
    result = agreement(exact, exact, prompt, 16)
    assert (result.tokens, result.gaps, result.noise) == (16, (), 0.0)
    rounded = load(PLAN, str(tiny_folder), device="cpu", dtype=torch.bfloat16)
    monkeypatch.setattr(
        module,
        "load",
        lambda *arguments, dtype, **named: load(*arguments, device="cpu", dtype=dtype or torch.bfloat16, **named),
    )
    assert plan_agreement(PLAN, str(tiny_folder), prompt, 16) == agreement(rounded, exact, prompt, 16)
    assert agreement(rounded, exact, prompt, 16).noise > 0


@pytest.mark.model
def test_a_bfloat16_engine_differs_only_in_close_calls(smollm2, long_text):
    plan = preset("int8", Workload("smollm2", "cpu", 200, 16))
    reference = load(plan, str(smollm2), device="cpu")
    engine = load(plan, str(smollm2), device="cpu", dtype=torch.bfloat16)
    prompt = reference.tokenizer(long_text[30_000:40_000])["input_ids"][:200]
    result = agreement(engine, reference, prompt, 16)
    assert result.tokens == 16
    assert 0 < result.noise < 1
    assert result.beyond_noise == 0
