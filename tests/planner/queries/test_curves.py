"""A plan over contexts: the same figures as one by one, memory by hand, and the staircase of offloaded layers."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeplan.planner import predict, preset
from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.queries.curves import (
    contexts_of,
    crossings,
    frontier,
    memory_over_contexts,
    offload_staircase,
    over_batches,
    over_contexts,
    resized,
)
from ridgeplan.planner.question import Question, ask
from ridgeplan.roofline.plan.plan import Placement
from ridgeplan.roofline.plan.policy import KV_BUDGET

CONTEXTS = (1000, 30_000, 120_000)


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 120_000)


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "magicdec-streaming", "dapq-quantspec"])
def test_predictions_of_many_contexts_are_those_of_each(name: str, question: Question) -> None:
    """Acceptance and budgets depend on the context, so each needs its own."""
    plan = preset(name, question.workload)
    together = over_contexts(plan, question, CONTEXTS)
    for context, row in zip(CONTEXTS, together, strict=True):
        prediction = predict(resized(plan, context), question.shape, question.profile)
        assert row.acceptance == prediction.acceptance
        for end in ("low", "best", "high"):
            assert vars(getattr(row, end)) == pytest.approx(vars(getattr(prediction, end)))


def test_memory_of_plain_decoding_by_hand(question: Question) -> None:
    """Llama-3.1-8B: keys and values of 8 heads of 128 elements in 32 layers, 2 bytes each, and 8.03e9 weights."""
    memory = memory_over_contexts(preset("autoregressive", question.workload), question, CONTEXTS)
    tokens = [context + 1024 + 1 for context in CONTEXTS]  # and the slot of the token that is decoded
    assert memory.kv.tolist() == [2 * 8 * 128 * 32 * 2 * token for token in tokens]
    assert memory.weights.tolist() == [2 * 8_030_261_248] * 3


@pytest.mark.parametrize("name", ["quantspec", "dapq-quantspec"])
def test_parts_add_up_to_the_peak_that_must_fit(name: str, question: Question) -> None:
    plan = preset(name, question.workload)
    memory = memory_over_contexts(plan, question, CONTEXTS)
    peak = [peak_bytes(resized(plan, context), question.shape, question.machine) for context in CONTEXTS]
    assert memory.peak.tolist() == pytest.approx(peak)


def test_contexts_end_at_the_model_s_longest(question: Question) -> None:
    contexts = contexts_of(question, 9)
    assert (contexts[0], contexts[-1], len(contexts)) == (1024, 131_072, 9)
    ratios = [late / early for early, late in itertools.pairwise(contexts)]
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
        (prediction,) = predict_all([middle], question.shape, question.profile, question.machine)
        assert prediction.offloaded_layers == step.layers
        assert prediction.best.peak_memory_bytes <= question.memory_limit_bytes


def test_one_memory_has_no_staircase() -> None:
    question = ask("meta-llama/Llama-3.1-8B", "dgx-spark", 40_000)
    assert [step.layers for step in offload_staircase(preset("autoregressive", question.workload), question)] == [0]


def test_the_staircase_leaves_room_for_new_tokens() -> None:
    ends = []
    for new_tokens in (1, 4000):
        question = ask("meta-llama/Llama-3.1-8B", "h200", 40_000, memory_limit="22GB", new_tokens=new_tokens)
        ends.append([step.last for step in offload_staircase(preset("autoregressive", question.workload), question)])
    few, many = ends
    assert many == [end - 3999 for end in few]


# Plans over batches, and the points that no other exceeds.

points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def batch_question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 32_768)


@pytest.mark.parametrize("batch", [1, 16])
def test_each_batch_has_the_gamma_that_is_fastest_there(batch: int, batch_question: Question) -> None:
    plan = preset("quantspec", batch_question.workload)
    curve = over_batches(plan, batch_question, [batch])
    gammas = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in range(1, 16)]
    times = [
        predict(resized(gamma, 32_768, batch), batch_question.shape, batch_question.profile).best.tpot_ms
        for gamma in gammas
    ]
    assert curve.gamma.tolist() == [1 + int(np.argmin(times))]
    assert curve.tpot_ms.tolist() == pytest.approx([min(times)])
    assert curve.per_gpu.tolist() == pytest.approx([1e3 * batch / min(times)])


def test_batches_that_do_not_fit_are_left_out(batch_question: Question) -> None:
    """Of 4.3 GB of KV each, 27 fit beside 16 GB of weights into 135 GB, but not 32."""
    curve = over_batches(preset("autoregressive", batch_question.workload), batch_question, [1, 8, 16, 32, 64])
    assert curve.batches.tolist() == [1, 8, 16]
    assert (curve.peak_bytes <= batch_question.memory_limit_bytes).all()


@given(points)
def test_the_frontier_is_what_no_point_exceeds(expected_points: list[tuple[int, int]]) -> None:
    x, y = (np.array(axis) for axis in zip(*expected_points, strict=True))
    best = frontier(x, y)
    kept = {(int(x[point]), int(y[point])) for point in best}
    better = {
        point
        for point in expected_points
        if not any(a >= point[0] and b >= point[1] and (a, b) != point for a, b in expected_points)
    }
    assert kept == better
    assert len(best) == len(kept)
    assert (np.diff(x[best]) > 0).all()


# Where curves cross, against closed forms.

X = np.geomspace(1, 1024, 11)


def test_power_laws_cross_where_algebra_says() -> None:
    """x and 3 sqrt(x) meet at 9; between points too, as both are straight on log scales."""
    (crossing,) = crossings(X, {"linear": X, "root": 3 * np.sqrt(X)})
    assert (crossing.x, crossing.y) == pytest.approx((9, 9))
    assert (crossing.before, crossing.after) == ("linear", "root")  # the lower one before and after


def test_three_curves_cross_in_pairs_in_order() -> None:
    points = crossings(X, {"one": X, "flat": np.full(11, 10.0), "root": 2 * np.sqrt(X)})
    assert [round(crossing.x, 6) for crossing in points] == [4, 10, 25]


@pytest.mark.parametrize("other", [X + 1, np.where(X < 100, np.nan, X / 2), np.full(11, np.nan)])
def test_no_crossing_where_curves_do_not_meet_or_have_no_values(other: np.ndarray) -> None:
    assert crossings(X, {"one": X, "other": other}) == []
    assert not any(math.isnan(crossing.x) for crossing in crossings(X, {"one": X, "other": other}))
