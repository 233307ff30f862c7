"""Plans over batches, and the points that no other exceeds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeplan.planner import predict, preset
from ridgeplan.planner.queries.curves import frontier, over_batches, resized
from ridgeplan.planner.question import Question, ask

points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 32_768)


@pytest.mark.parametrize("batch", [1, 16])
def test_each_batch_has_the_gamma_that_is_fastest_there(batch: int, question: Question) -> None:
    plan = preset("quantspec", question.workload)
    curve = over_batches(plan, question, [batch])
    gammas = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in range(1, 16)]
    times = [predict(resized(one, 32_768, batch), question.shape, question.profile).best.tpot_ms for one in gammas]
    assert curve.gamma.tolist() == [1 + int(np.argmin(times))]
    assert curve.tpot_ms.tolist() == pytest.approx([min(times)])
    assert curve.per_gpu.tolist() == pytest.approx([1e3 * batch / min(times)])


def test_batches_that_do_not_fit_are_left_out(question: Question) -> None:
    """Of 4.3 GB of KV each, 27 fit beside 16 GB of weights into 135 GB, but not 32."""
    curve = over_batches(preset("autoregressive", question.workload), question, [1, 8, 16, 32, 64])
    assert curve.batches.tolist() == [1, 8, 16]
    assert (curve.peak_bytes <= question.memory_limit_bytes).all()


@given(points)
def test_the_frontier_is_what_no_point_exceeds(found: list[tuple[int, int]]) -> None:
    x, y = (np.array(axis) for axis in zip(*found, strict=True))
    best = frontier(x, y)
    kept = {(int(x[one]), int(y[one])) for one in best}
    better = {one for one in found if not any(a >= one[0] and b >= one[1] and (a, b) != one for a, b in found)}
    assert kept == better
    assert len(best) == len(kept)
    assert (np.diff(x[best]) > 0).all()
