"""Every answer of the planner: its line is short, its rows are flat, its figure shows them."""

import json

import pytest

from ridgeplan import planner
from ridgeplan.planner.render.tables import Table
from ridgeplan.roofline.catalog.profile import Profile

MODEL, GPU = "meta-llama/Llama-3.1-8B", "h200"


@pytest.fixture(scope="module")
def answers(h200_profile: Profile) -> dict[str, Table]:
    common = {"profile": h200_profile}
    return {
        "recommend": planner.recommend(MODEL, GPU, 120_000, **common),
        "estimate": planner.estimate(MODEL, GPU, "128k", preset="quantspec", **common),
        "fit": planner.fit(MODEL, GPU, batches=(1, 4), contexts=(8192, 65536), **common),
        "compare": planner.compare([MODEL], [GPU, "b200"], 65536, presets=("autoregressive", "quantspec"), **common),
        "sweep": planner.grid_sweep(MODEL, GPU, {"ctx": (8192, 65536), "batch": (1, 4)}, **common),
        "cost": planner.serving_cost(MODEL, {GPU: 3.0}, 8192, batches=(1, 4), **common),
    }


ROWS = {"estimate": 2, "fit": 4, "compare": 4, "sweep": 4, "cost": 2}


@pytest.mark.parametrize("name", ["recommend", *ROWS])
def test_an_answer_is_a_short_line_and_a_table(answers: dict[str, Table], name: str) -> None:
    answer = answers[name]
    assert len(repr(answer)) < 300
    assert "\n" not in repr(answer)
    rows = answer.table()
    assert json.dumps(rows, allow_nan=False)
    assert len(answer.to_pandas()) == len(rows) == ROWS.get(name, len(rows))
    assert "<table>" in answer._repr_html_()


@pytest.mark.parametrize("name", ["recommend", *ROWS])
def test_a_figure_shows_every_row(answers: dict[str, Table], name: str) -> None:
    answer = answers[name]
    shown = sum(len(trace.x) for trace in answer.plot().data)
    assert shown == len(answer.table())


def test_a_recommendation_lists_each_plan_once_and_its_own_first(answers: dict[str, Table]) -> None:
    answer = answers["recommend"]
    assert isinstance(answer, planner.Recommendation)
    rows = answer.table()
    assert (rows[0]["plan"], rows[0]["verdict"]) == (answer.name, "recommended")
    plans = [answer.plan, *(one.plan for one in answer.alternatives)]
    estimated = answer.best_estimated
    assert len(rows) == len(plans) + bool(estimated and estimated.plan not in plans)
    assert max(len(repr(one)) for one in (answer.predicted, *answer.alternatives)) < 600


def test_an_estimate_is_that_of_the_recommendation(answers: dict[str, Table], h200_profile: Profile) -> None:
    """The same preset at the same size, as the search lists it; its speed-up is the ratio of two times per token."""
    estimate = answers["estimate"]
    assert isinstance(estimate, planner.PlanEstimate)
    recommended = planner.recommend(MODEL, GPU, "128k", profile=h200_profile, quality="lossy")
    listed = {one.preset: one.predicted for one in recommended.alternatives} | {recommended.name: recommended.predicted}
    assert estimate.predicted.best == listed["quantspec"].best
    assert estimate.predicted.speedup == estimate.baseline.best.tpot_ms / estimate.predicted.best.tpot_ms
    assert estimate.fits
    assert [row["plan"] for row in estimate.table()] == ["quantspec", "plain decoding"]
    assert {row["part"] for row in estimate.operations()} == {"prefill", "draft", "target"}


def test_an_estimate_takes_a_gamma_and_lets_it_adapt(h200_profile: Profile) -> None:
    asked = {"preset": "quantspec", "profile": h200_profile}
    fixed = planner.estimate(MODEL, GPU, 65536, gamma=5, **asked)
    assert (fixed.predicted.gamma, fixed.plan.speculation.adaptive) == (5, False)
    assert planner.estimate(MODEL, GPU, 65536, gamma=5, adaptive=True, **asked).plan.speculation.adaptive
    with pytest.raises(planner.PlanError, match="gamma is 3; allowed: none, as autoregressive drafts nothing"):
        planner.estimate(MODEL, GPU, 65536, preset="autoregressive", gamma=3, profile=h200_profile)


def test_a_given_gamma_keeps_the_published_ratio_and_none_takes_the_fastest(h200_profile: Profile) -> None:
    fastest = planner.estimate(MODEL, GPU, 65536, preset="specattn", profile=h200_profile)
    given = planner.estimate(MODEL, GPU, 65536, preset="specattn", gamma=5, profile=h200_profile)
    published = planner.preset("specattn", given.plan.workload).speculation.selection
    assert given.plan.speculation.selection == published
    assert fastest.plan.speculation.selection != published
    assert fastest.predicted.best.tpot_ms < given.predicted.best.tpot_ms


def test_what_does_not_fit_says_so(h200_profile: Profile) -> None:
    estimate = planner.estimate(MODEL, GPU, 65536, preset="quantspec", memory_limit="16GB", profile=h200_profile)
    assert not estimate.fits
    assert estimate.summary().endswith("does not fit")
