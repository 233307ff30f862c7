"""The page, run without a browser."""

import json
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ridgeplan.dashboards import app
from ridgeplan.planner import Plan
from ridgeplan.roofline.catalog.profile import Profile

pytestmark = pytest.mark.usefixtures("only_profile")


@pytest.fixture
def page() -> AppTest:
    return AppTest.from_file(app.__file__, default_timeout=300)


def shown(page: AppTest) -> str:
    assert not page.exception
    items = (*page.title, *page.caption, *page.markdown, *page.code, *page.error, *page.warning)
    return " ".join(str(item.value).replace("\\", "") for item in items)  # without Markdown's escapes


def charts_of(page: AppTest) -> int:
    return len(page.get("plotly_chart"))


def test_default_page_recommends_a_plan(page: AppTest) -> None:
    page.run()
    text = shown(page)
    assert "meta-llama/Llama-3.1-8B" in text
    assert "120000 tokens of context" in text
    assert [metric.label for metric in page.metric] == [
        "Time per token", "Time to first token", "Tokens per second", "Speed-up", "Peak memory",
    ]  # fmt: skip
    assert not page.error
    assert charts_of(page) == 4
    assert page.title[0].value == "quantspec-int8"


def test_the_best_of_all_stands_beside_the_plan_that_runs(page: AppTest) -> None:
    page.run()
    assert re.search(r"Best of all, whether it runs or not: .*; estimated only, the runtime cannot", shown(page))
    page.selectbox(key="objective").set_value("memory").run()
    assert f"Best of all, whether it runs or not: {page.title[0].value}, the plan above" in shown(page)


def test_the_share_of_the_memory_is_an_input(page: AppTest) -> None:
    page.run()
    page.number_input(key="memory_utilization").set_value(0.5).run()
    assert "of 70.2" in shown(page)
    page.number_input(key="memory_utilization").set_value(2.0).run()
    assert "memory_utilization is 2.0; allowed: above 0 up to 1" in shown(page)


def test_alternatives_come_with_reasons(page: AppTest) -> None:
    page.run()
    table = page.dataframe[0].value
    assert {"plan", "ms per token", "why not"} <= set(table.columns)
    assert table["why not"].str.len().min() > 0
    assert "autoregressive" in set(table["plan"])


def test_the_plan_can_be_downloaded(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[tuple[str, ...]] = []
    monkeypatch.setattr("streamlit.download_button", lambda *arguments: offered.append(arguments))
    page.run()
    [(_, text, name, mime)] = offered
    assert Plan.from_json(text).workload.context == 120_000
    assert (name, mime) == ("plan.json", "application/json")


def test_changed_inputs_change_the_answer(page: AppTest) -> None:
    page.run()
    before = page.metric[0].value
    page.number_input(key="context").set_value(2048)
    page.number_input(key="batch").set_value(4)
    page.selectbox(key="model").set_value("Qwen/Qwen3-8B")
    page.selectbox(key="gpu").set_value("rtx4090")
    page.selectbox(key="quality").set_value("exact").run()
    text = shown(page)
    assert "Qwen/Qwen3-8B" in text
    assert "on rtx4090, 2048 tokens of context, batch 4" in text
    assert "rtx4090 is not calibrated" in text
    assert page.metric[0].value != before
    assert "gives up" not in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("context", 0, "context is 0; allowed"),
        ("batch", -1, "batch is -1; allowed"),
        ("new_tokens", 0, "new_tokens is 0; allowed"),
        ("memory_limit", -2.0, "memory_limit is"),
        ("memory_limit", 1.0, "nothing fits"),
    ],
)
def test_bad_numbers_show_a_message(page: AppTest, key: str, value: float, words: str) -> None:
    page.run()
    page.number_input(key=key).set_value(value).run()
    assert words in shown(page)
    assert len(page.error) == 1
    assert charts_of(page) == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("own_model", "meta-llama/Llama-3.1-9B", "Did you mean meta-llama/Llama-3.1-8B"),
        ("own_model", "nowhere.gguf", "cannot read nowhere.gguf"),
        ("own_gpu", "h20o", "unknown GPU 'h20o'"),
        ("own_gpu", "nowhere.toml", "cannot read nowhere.toml"),
    ],
)
def test_bad_names_show_a_message(page: AppTest, key: str, value: str, words: str) -> None:
    page.run()
    page.text_input(key=key).set_value(value).run()
    assert words in shown(page)
    assert charts_of(page) == 0


def test_messages_hold_no_markup(page: AppTest) -> None:
    """A model's name could make the browser fetch an image."""
    page.run()
    page.text_input(key="own_model").set_value("![x](http://nowhere/x)").run()
    assert r"!\[x\](http" in page.error[0].value


def test_a_message_goes_away_with_its_cause(page: AppTest) -> None:
    page.run()
    page.number_input(key="context").set_value(0).run()
    assert page.error
    page.number_input(key="context").set_value(4096).run()
    assert not page.error
    assert charts_of(page) == 4


def test_yarn_is_noted(page: AppTest) -> None:
    page.run()
    page.number_input(key="context").set_value(200_000).run()
    assert "context 200000 is beyond the limit of meta-llama/Llama-3.1-8B; allowed: up to 131072" in shown(page)
    page.checkbox(key="yarn").set_value(True).run()
    assert "stretched 2x by YaRN" in shown(page)


def test_this_machine(page: AppTest, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    page.run()
    page.selectbox(key="gpu").set_value("auto").run()
    assert "ridgeplan calibrate" in shown(page)
    (tmp_path / "ridgeplan").mkdir()
    (tmp_path / "ridgeplan" / "profile.json").write_text(profile.to_json())
    page.run()
    assert not page.error


def test_a_defect_is_not_dressed_up_as_bad_input(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Plan:
        return json.loads("{")

    monkeypatch.setattr("ridgeplan.planner.recommend", broken)
    page.run()
    assert page.exception
    assert not page.error
