"""Answers in Python: one line, HTML that is escaped, data frames, figures."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ridgeplan import planner
from ridgeplan.planner.render.plots import draw
from ridgeplan.planner.render.tables import SHOWN_ROWS, Bars, Lines, NotInstalled, Table, labels, table_html
from ridgeplan.roofline.catalog.profile import Profile

ROWS = [
    {"gpu": "h200", "context": 8192, "batch": 1, "ms": 2.0, "low": 1.5, "high": 3.0},
    {"gpu": "h200", "context": 4096, "batch": 1, "ms": 1.0, "low": 0.5, "high": 2.0},
    {"gpu": "a6000", "context": 4096, "batch": 1, "ms": 5.0, "low": 4.0, "high": 7.0},
]


@dataclass(frozen=True, repr=False)
class Answer(Table):
    count: int = 1

    chart = Bars("ms", "ms per token", "low", "high")
    names = ("gpu", "context")

    def table(self) -> list[dict[str, Any]]:
        return ROWS

    def summary(self) -> str:
        return "<b>three</b> rows"


def test_an_answer_is_one_line() -> None:
    assert repr(Answer()) == str(Answer()) == "Answer(<b>three</b> rows)"


def test_a_data_frame_has_the_rows() -> None:
    frame = Answer().to_pandas()
    assert list(frame.columns) == list(ROWS[0])
    assert frame["ms"].tolist() == [2.0, 1.0, 5.0]


def test_without_pandas_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotInstalled, match=r"^to_pandas needs pandas, which is not installed: pip install pandas$"):
        Answer().to_pandas()


def test_without_plotly_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ridgeplan.planner.render.plots", raising=False)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(
        NotInstalled,
        match=r"^plot needs plotly, which is not installed: pip install 'ridgeplan\[page\]( @ file://.*)?'$",
    ):
        Answer().plot()


def test_html_is_escaped_and_cut() -> None:
    html = table_html("a < b", [{"name": "<script>", "value": 1 / 3, "absent": None}] * (SHOWN_ROWS + 2))
    assert "<p>a &lt; b</p>" in html
    assert "<script>" not in html
    assert html.count("<td>0.3333</td>") == SHOWN_ROWS
    assert html.endswith("<p>2 more rows</p>")
    assert "&lt;b&gt;three" in Answer()._repr_html_()


def test_bars_have_the_ends_of_their_bands() -> None:
    (bar,) = Answer().plot().data
    assert list(bar.y) == ["h200, 8192", "h200, 4096", "a6000, 4096"]
    assert list(bar.x) == [2.0, 1.0, 5.0]
    assert (list(bar.error_x.array), list(bar.error_x.arrayminus)) == ([1.0, 1.0, 2.0], [0.5, 0.5, 1.0])


def test_lines_run_over_what_varies_with_one_for_each_of_the_rest() -> None:
    figure = draw(ROWS, Lines(("batch", "context"), "ms", "ms", ("gpu",)), (), "title")
    assert figure.layout.xaxis.title.text == "context"  # all batches are the same
    assert {line.name: (list(line.x), list(line.y)) for line in figure.data} == {
        "h200": ([4096, 8192], [1.0, 2.0]), "a6000": ([4096], [5.0]),
    }  # fmt: skip


def test_labels_name_what_differs() -> None:
    assert labels(ROWS, ("gpu", "batch", "context")) == ["h200, 8192", "h200, 4096", "a6000, 4096"]
    assert labels(ROWS[:1], ("gpu", "batch")) == ["1"]


def test_planning_imports_neither_pandas_nor_plotly() -> None:
    code = "import sys; from ridgeplan import planner; print({'pandas', 'plotly'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# Every answer of the planner: its line is short, its rows are flat, its figure shows them.

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


ANSWER_ROWS = {"estimate": 2, "fit": 4, "compare": 4, "sweep": 4, "cost": 2}


@pytest.mark.parametrize("name", ["recommend", *ANSWER_ROWS])
def test_an_answer_is_a_short_line_and_a_table(answers: dict[str, Table], name: str) -> None:
    answer = answers[name]
    assert len(repr(answer)) < 300
    assert "\n" not in repr(answer)
    rows = answer.table()
    assert json.dumps(rows, allow_nan=False)
    assert len(answer.to_pandas()) == len(rows) == ANSWER_ROWS.get(name, len(rows))
    assert "<table>" in answer._repr_html_()


@pytest.mark.parametrize("name", ["recommend", *ANSWER_ROWS])
def test_a_figure_shows_every_row(answers: dict[str, Table], name: str) -> None:
    answer = answers[name]
    shown = sum(len(trace.x) for trace in answer.plot().data)
    assert shown == len(answer.table())


def test_a_recommendation_lists_each_plan_once_and_its_own_first(answers: dict[str, Table]) -> None:
    answer = answers["recommend"]
    assert isinstance(answer, planner.Recommendation)
    rows = answer.table()
    assert (rows[0]["plan"], rows[0]["verdict"]) == (answer.name, "recommended")
    plans = [answer.plan, *(prediction.plan for prediction in answer.alternatives)]
    estimated = answer.best_estimated
    assert len(rows) == len(plans) + bool(estimated and estimated.plan not in plans)
    assert max(len(repr(prediction)) for prediction in (answer.predicted, *answer.alternatives)) < 600


def test_an_estimate_is_that_of_the_recommendation(answers: dict[str, Table], h200_profile: Profile) -> None:
    """The same preset at the same size, as the search lists it; its speed-up is the ratio of two times per token."""
    estimate = answers["estimate"]
    assert isinstance(estimate, planner.PlanEstimate)
    recommended = planner.recommend(MODEL, GPU, "128k", profile=h200_profile, quality="lossy")
    listed = {alternative.preset: alternative.predicted for alternative in recommended.alternatives} | {
        recommended.name: recommended.predicted
    }
    assert estimate.predicted.best == listed["quantspec"].best
    assert estimate.predicted.speedup == estimate.baseline.best.tpot_ms / estimate.predicted.best.tpot_ms
    assert estimate.fits
    assert [row["plan"] for row in estimate.table()] == ["quantspec", "plain decoding"]
    assert {row["part"] for row in estimate.operations()} == {"prefill", "draft", "target"}


def test_an_estimate_takes_a_gamma_and_lets_it_adapt(h200_profile: Profile) -> None:
    question = {"preset": "quantspec", "profile": h200_profile}
    fixed = planner.estimate(MODEL, GPU, 65536, gamma=5, **question)
    assert (fixed.predicted.gamma, fixed.plan.speculation.adaptive) == (5, False)
    assert planner.estimate(MODEL, GPU, 65536, gamma=5, adaptive=True, **question).plan.speculation.adaptive
    with pytest.raises(planner.PlanError, match="gamma is 3; allowed: none, as autoregressive drafts nothing"):
        planner.estimate(MODEL, GPU, 65536, preset="autoregressive", gamma=3, profile=h200_profile)


def test_a_given_gamma_keeps_the_published_ratio_and_none_takes_the_fastest(h200_profile: Profile) -> None:
    fastest = planner.estimate(MODEL, GPU, 65536, preset="specattn-weights", profile=h200_profile)
    estimate = planner.estimate(MODEL, GPU, 65536, preset="specattn-weights", gamma=5, profile=h200_profile)
    published = planner.preset("specattn-weights", estimate.plan.workload).speculation.selection
    assert estimate.plan.speculation.selection == published
    assert fastest.plan.speculation.selection != published
    assert fastest.predicted.best.tpot_ms < estimate.predicted.best.tpot_ms


def test_what_does_not_fit_says_so(h200_profile: Profile) -> None:
    estimate = planner.estimate(MODEL, GPU, 65536, preset="quantspec", memory_limit="16GB", profile=h200_profile)
    assert not estimate.fits
    assert estimate.summary().endswith("does not fit")
