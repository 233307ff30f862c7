"""A plan over contexts: the same figures as one by one, memory by hand, and the staircase of offloaded layers."""

import itertools
from dataclasses import replace

import pytest

from ridgeplan.planner import predict, preset
from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.queries.curves import (
    contexts_of,
    memory_over_contexts,
    offload_staircase,
    over_contexts,
    resized,
)
from ridgeplan.planner.question import Question, ask
from ridgeplan.roofline.plan.plan import Placement
from ridgeplan.roofline.plan.policies.base import KV_BUDGET

CONTEXTS = (1000, 30_000, 120_000)


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 120_000)


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "magicdec-streaming", "dapq-quantspec"])
def test_predictions_of_many_contexts_are_those_of_each(name: str, question: Question) -> None:
    """Acceptance and budgets depend on the context, so each needs its own."""
    plan = preset(name, question.workload)
    together = over_contexts(plan, question, CONTEXTS)
    for context, found in zip(CONTEXTS, together, strict=True):
        alone = predict(resized(plan, context), question.shape, question.profile)
        assert found.acceptance == alone.acceptance
        for end in ("low", "best", "high"):
            assert vars(getattr(found, end)) == pytest.approx(vars(getattr(alone, end)))


def test_memory_of_plain_decoding_by_hand(question: Question) -> None:
    """Llama-3.1-8B: keys and values of 8 heads of 128 elements in 32 layers, 2 bytes each, and 8.03e9 weights."""
    memory = memory_over_contexts(preset("autoregressive", question.workload), question, CONTEXTS)
    tokens = [context + 1024 + 1 for context in CONTEXTS]  # and the slot of the token that is decoded
    assert memory.kv.tolist() == [2 * 8 * 128 * 32 * 2 * one for one in tokens]
    assert memory.weights.tolist() == [2 * 8_030_261_248] * 3


@pytest.mark.parametrize("name", ["quantspec", "dapq-quantspec"])
def test_parts_add_up_to_the_peak_that_must_fit(name: str, question: Question) -> None:
    plan = preset(name, question.workload)
    memory = memory_over_contexts(plan, question, CONTEXTS)
    alone = [peak_bytes(resized(plan, context), question.shape, question.machine) for context in CONTEXTS]
    assert memory.peak.tolist() == pytest.approx(alone)


def test_contexts_end_at_the_model_s_longest(question: Question) -> None:
    found = contexts_of(question, 9)
    assert (found[0], found[-1], len(found)) == (1024, 131_072, 9)
    ratios = [late / early for early, late in itertools.pairwise(found)]
    assert ratios == pytest.approx([2 ** (7 / 8)] * 8, rel=0.001)


@pytest.mark.parametrize("limit", ["22GB", "24GB"])
def test_the_staircase_says_how_many_layers_a_plan_offloads(limit: str) -> None:
    """Halfway along every step, a plan that may offload leaves that many layers on the host."""
    question = ask("meta-llama/Llama-3.1-8B", "h200", 40_000, memory_limit=limit, new_tokens=1)
    plan = preset("autoregressive", question.workload)
    steps = offload_staircase(plan, question)
    assert steps[0].layers == 0
    assert all(early.last == late.first for early, late in itertools.pairwise(steps))
    offloading = replace(plan, placement=Placement(True, KV_BUDGET))
    for step in steps[:12]:
        middle = resized(offloading, (step.first + step.last) // 2)
        (found,) = predict_all([middle], question.shape, question.profile, question.machine)
        assert found.offloaded_layers == step.layers
        assert found.best.peak_memory_bytes <= question.memory_limit_bytes
