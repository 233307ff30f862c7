"""What the planner's speed is measured on: the plans of a real question, and calls that really run."""

import pytest

from ridgeplan.planner import resolve, workload_for
from ridgeplan.planner.search import families
from ridgeplan.validate.planner_speed import CONTEXT, GPU, MODEL, measure_planner


@pytest.mark.slow
def test_the_planner_is_timed_on_the_plans_of_its_question() -> None:
    steps = []
    result = measure_planner(1, lambda what, done, total: steps.append((what, done, total)))
    shape, profile = resolve(MODEL, GPU)
    spaces = families(workload_for(shape, profile, CONTEXT, 1024, 1, yarn=False), offload=False)
    assert result.searched_plans == sum(len(space.gammas) * len(space.ratios) for space in spaces)
    assert result.searched_plans_per_s * result.warm_s == pytest.approx(result.searched_plans)
    assert min(result.help_s, result.cold_s, result.first_s, result.warm_s, result.swept_plans_per_s) > 0
    assert min(result.map_s, result.grid_s) > 0
    assert [(done, total) for _, done, total in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
