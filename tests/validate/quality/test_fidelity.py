"""Fidelity and perplexity: by hand, on the plain plan, and against acceptance, which is the same figure."""

import math

import pytest
import torch

from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import load
from ridgeplan.validate.acceptance import ROUND, Draft, TeacherForced
from ridgeplan.validate.quality.fidelity import Passage, next_logits, overlap, perplexity, surprise

CONTEXT, TOKENS = 304, 3 * ROUND
TEXT = torch.randint(256, (CONTEXT + TOKENS + 1,), generator=torch.Generator().manual_seed(0)).tolist()


def test_overlap_is_one_minus_half_the_absolute_difference():
    # p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2): TV 1/4. Then p = q: TV 0. Their mean is 7/8.
    one = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    other = torch.log(torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]])) + 3.0
    assert overlap(one, other) == pytest.approx(7 / 8)
    assert overlap(one, one) == pytest.approx(1)
    apart = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    assert overlap(apart[:1], apart[1:]) == pytest.approx(0, abs=1e-6)


def test_perplexity_by_hand():
    # The second token has probability 1/2 after the first, the third 1/8 after the second: (2 * 8) ** (1/2) = 4.
    passage = Passage((9,), (5, 0, 1))
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.875, 0.125]]))
    assert surprise(logits, passage) == pytest.approx(math.log(4))
    assert perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_passages_end_with_the_tokens_that_are_measured():
    assert Passage.split([1, 2, 3, 4, 5], 2) == Passage((1, 2), (3, 4, 5))


@pytest.fixture(scope="module")
def engines(tiny_folder):
    workload = Workload("tiny", "cpu", CONTEXT, TOKENS + 1)
    plain = load(Plan(workload), str(tiny_folder), device="cpu")
    int8 = load(preset("int8", workload), str(tiny_folder), device="cpu", weights=plain.weights)
    return plain, int8


def test_the_plain_plan_is_faithful_to_itself_and_predicts_as_transformers_does(engines, tiny_folder):
    import transformers

    plain, _ = engines
    passage = Passage.split(TEXT, TOKENS)
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
    passage = Passage.split(TEXT, TOKENS)
    fidelity = overlap(next_logits(plain, [passage])[0], next_logits(int8, [passage])[0])
    (accepted,) = TeacherForced(plain, None, [Draft("kv8")]).run(TEXT[:-1], CONTEXT, lambda: None)
    assert fidelity == pytest.approx(accepted.mean, abs=1e-5)
    assert 0.5 < fidelity < 1
