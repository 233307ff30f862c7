"""Each tab shows its charts, and what its own inputs change."""

from pathlib import Path

import pytest
from grids import pairs
from streamlit.testing.v1 import AppTest

from ridgeplan.dashboards import app
from ridgeplan.planner.queries.compare import compare
from ridgeplan.roofline.plan.presets import short_name
from ridgeplan.validate.suite.report import SuiteReport

pytestmark = pytest.mark.usefixtures("questions_answered_once")
REPORT = Path(__file__).parents[3] / "validate" / "results" / "suite_h200.json"
MODELS = ["deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "mistralai/Mistral-7B-v0.1"]
HEAD_CHARTS = 1  # memory over the context, above the tabs


def tab(name: str, **url: str | list[str]) -> AppTest:
    page = AppTest.from_file(app.__file__, default_timeout=300)
    for key, value in {"tab": name, **url}.items():
        page.query_params[key] = value
    page.run()
    assert not page.exception
    return page


def charts_of(page: AppTest) -> int:
    return len(page.get("plotly_chart")) - HEAD_CHARTS


@pytest.mark.parametrize(
    ("name", "charts"),
    [("Capacity", 1), ("Compare", 1), ("Trade-offs", 1), ("Breakdown", 4), ("Speculation", 1), ("Papers", 1),
     ("Validation", 0), ("Traffic", 3)],
)  # fmt: skip
def test_only_the_open_tab_is_computed(name: str, charts: int) -> None:
    page = tab(name)
    assert charts_of(page) == charts
    assert not page.error


@pytest.mark.parametrize(("name", "model"), pairs([*app.ANSWERED], MODELS, 0))
def test_tabs_hold_for_models_with_experts_latent_attention_and_windows(name: str, model: str) -> None:
    page = tab(name, model=model, gpu="b200", context="4k", quality="lossy", memory_utilization="1.0")
    assert len(page.get("plotly_chart")) >= (1 if page.error else 2)


@pytest.mark.parametrize(("name", "least"), [("Compare", 1), ("Trade-offs", 1), ("Breakdown", 4)])
def test_tabs_hold_for_several_gpus(name: str, least: int) -> None:
    page = tab(name, model="meta-llama/Llama-3.1-70B", gpu="h100", context="8k", num_gpus="2")
    assert not page.error and charts_of(page) >= least
    assert any("tp 2" in warning.value for warning in page.warning)


def test_traffic_shows_the_energy_that_its_notes_speak_of() -> None:
    text = "\n".join(caption.value.replace("\\", "") for caption in tab("Traffic", rates="1").caption)
    (spent,) = (line for line in text.splitlines() if "J per output token" in line)
    assert spent.startswith("- 1/s: $") and "per million output tokens" in spent
    assert "\n- Energy is that of GPUs at 700 W" in text


def test_traffic_says_in_words_how_many_gpus_hold_the_limits() -> None:
    texts = [str(item.value).replace("\\", "") for item in tab("Traffic", rates="0.5", ttft_p99="60s").markdown]
    (verdict,) = (text for text in texts if text.startswith("- At "))
    assert verdict.startswith("- At 0.5/s, 1 GPU holds the latency limits: 99% of the requests get their first token")


def test_each_gpu_is_compared_with_its_own_best_plan() -> None:
    """As `compare` does: the plan of the first GPU may neither run on another nor be its best."""
    table = tab("Compare", gpus=["b200", "a100-80gb"]).dataframe[0].value
    assert list(table[""]) == ["h200", "b200", "a100-80gb"]
    compared = compare("meta-llama/Llama-3.1-8B", list(table[""]), "120k").plans
    assert list(table["plan"]) == [short_name(item.name) for item in compared]
    assert len(set(table["plan"])) > 1
    assert list(table["ms per token"]) == [round(item.predicted.best.tpot_ms, 3) for item in compared]


def test_a_recommended_plan_that_is_no_best_choice_is_mentioned() -> None:
    page = tab("Trade-offs", objective="memory")
    assert "is not among them" in " ".join(str(item.value) for item in page.caption)


def test_plans_are_compared_at_their_fastest() -> None:
    page = tab("Compare", compare="Plans", plans="autoregressive")
    table = page.dataframe[0].value
    assert list(table[""]) == ["quantspec-int8", "autoregressive"]
    assert table["ms per token"][0] == pytest.approx(float(page.metric[0].value.removesuffix(" ms")), rel=0.005)


def test_all_plans_come_with_the_reasons_why_they_lost() -> None:
    table = tab("Compare", compare="All plans").dataframe[0].value
    assert {"plan", "ms per token", "why not"} <= set(table.columns)
    assert table["why not"].str.len().min() > 0
    assert "autoregressive" in set(table["plan"])


def test_formulas_are_shown_when_they_are_opened() -> None:
    page = tab("Breakdown")
    assert not page.latex
    page.session_state["formulas"] = True
    page.run()
    assert not page.exception
    assert len(page.latex) == 24  # FLOPs and bytes of the 12 operations of a dense decoder


@pytest.mark.parametrize(("key", "words"), [("tpot_max", "'soon' is not a time"), ("ttft_max", "'soon' is not a time")])
def test_a_limit_that_is_no_time_is_said(key: str, words: str) -> None:
    page = tab("Capacity", **{key: "soon"})
    assert words in str(page.error[0].value).replace("\\", "")


def test_all_mistakes_of_a_tab_are_listed_at_once() -> None:
    page = tab("Traffic", rates="4/day", isl="normal:8k", ttft_p99="soon")
    lines = str(page.error[0].value).replace("\\", "").splitlines()
    assert len(page.error) == 1 and len(lines) == 3
    assert "'4/day' is not a rate" in lines[0] and "'normal:8k'" in lines[1] and "'soon' is not a time" in lines[2]


def test_the_best_choices_are_numbered_as_in_the_figure() -> None:
    rows = tab("Trade-offs").dataframe[0].value
    assert list(rows[""]) == list(range(1, len(rows) + 1))
    assert rows["tokens/s of one request"].is_monotonic_increasing
    assert rows["tokens/s of the GPU"].is_monotonic_decreasing


def test_another_figure_of_a_paper_has_its_own_sliders() -> None:
    page = tab("Papers")
    page.selectbox(key="figure").set_value(
        next(option for option in page.selectbox(key="figure").options if "Fig 4" in option)
    )
    page.run()
    assert not page.exception
    assert page.select_slider(key="quantspec-fig4-gamma").options[0] == "1"


def test_a_report_is_loaded() -> None:
    page = tab("Validation")
    page.file_uploader(key="report").set_value(("report.json", REPORT.read_bytes(), "application/json")).run()
    assert not page.exception
    assert not page.error
    report = SuiteReport.from_json(REPORT.read_bytes())
    worst = page.dataframe[-1].value
    assert len(worst) == 20
    assert worst["case"][0] == report.worst_rows(1)[0].case


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"schema": 1, "suite": "smoke"}'])
def test_a_report_that_is_none_shows_a_message(text: bytes) -> None:
    page = tab("Validation")
    page.file_uploader(key="report").set_value(("report.json", text, "application/json")).run()
    assert not page.exception
    assert len(page.error) == 1


@pytest.mark.parametrize(("name", "engine"), pairs([*app.ANSWERED], ["vllm", "sglang"], 0))
def test_tabs_hold_for_plans_of_other_engines(name: str, engine: str) -> None:
    """A tab that shows what an engine does not run says so in one line."""
    page = tab(name, backend=engine, context="32k", batch="4")
    messages = [error.value for error in page.error]
    assert all(f"{engine} has no" in message for message in messages)
    assert len(page.get("plotly_chart")) >= (1 if messages else 2)
