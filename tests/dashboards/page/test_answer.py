"""The page without a browser: the answer, its inputs, what is copied and downloaded."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ridgeplan import planner
from ridgeplan.dashboards import app
from ridgeplan.dashboards.page.answer import length_fixes
from ridgeplan.dashboards.page.inputs import FIELDS, PageQuestion, escaped
from ridgeplan.planner import Plan, SearchOptions
from ridgeplan.planner.plan_file import read_plan
from ridgeplan.planner.render.text import plain_words
from ridgeplan.planner.render.verdict import plan_sentence, reasons, sentence
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Profile

pytestmark = pytest.mark.usefixtures("questions_answered_once")
TILES = ["Time per token", "First token", "Tokens/s", "Speed-up", "Peak memory", "1M new tokens"]


@pytest.fixture
def page() -> AppTest:
    return AppTest.from_file(app.__file__, default_timeout=300)


def shown(page: AppTest) -> str:
    assert not page.exception
    items = (*page.title, *page.caption, *page.markdown, *page.code, *page.error, *page.warning)
    return " ".join(str(item.value).replace("\\", "") for item in items)  # without Markdown's escapes


def verdict(page: AppTest) -> str:
    return str(page.markdown[0].value).replace("\\", "")


def command(page: AppTest) -> list[str]:
    return shlex.split(page.code[0].value)


def charts_of(page: AppTest) -> int:
    return len(page.get("plotly_chart"))


def test_one_sentence_names_the_plan_its_speed_and_how_sure_that_is(page: AppTest) -> None:
    page.run()
    expected = planner.recommend("meta-llama/Llama-3.1-8B", "h200", "120k")
    sentence = re.fullmatch(r"### Llama-3.1-8B on h200: ([\d.]+) ms per token, ([\d.]+)x as fast as plain decoding, in "
                         r"[\d.]+ GB of 136 GB\.", verdict(page))  # fmt: skip
    assert sentence
    assert float(sentence[1]) == pytest.approx(expected.predicted.best.tpot_ms, rel=0.005)
    assert float(sentence[2]) == pytest.approx(expected.predicted.speedup, abs=0.005)
    how = str(page.markdown[1].value).replace("\\", "")
    assert how.startswith(
        f"Recommended: {plain_words(expected.plan)} ({expected.name}). Faster than plain decoding with "
    )
    assert "meta-llama/Llama-3.1-8B on h200, 120k tokens of context, batch 1" in shown(page)
    assert [metric.label for metric in page.metric] == TILES
    assert not page.error
    assert charts_of(page) == 2  # memory, and the first tab's map


def test_where_nothing_is_surely_faster_plain_decoding_is_the_verdict(page: AppTest) -> None:
    page.run()
    page.text_input(key="batch").set_value("256")
    page.text_input(key="context").set_value("1k")
    page.selectbox(key="quality").set_value("exact").run()
    best = planner.recommend("meta-llama/Llama-3.1-8B", "h200", 1024, batch=256, quality="exact")
    assert best.name == "autoregressive"
    assert re.fullmatch(r"### Llama-3.1-8B on h200: [\d.]+ ms per token, in [\d.]+ GB of 136 GB\.", verdict(page))
    assert "Recommended: plain decoding (autoregressive). No plan that runs is reliably faster." in shown(page)


def test_without_a_probability_the_plan_is_still_named() -> None:
    answer = planner.recommend("meta-llama/Llama-3.1-8B", "h200", "120k")
    assert "Faster than plain decoding with over 99% probability." in plan_sentence(answer)
    unknown = plan_sentence(replace(answer, predicted=replace(answer.predicted, beats_plain=None)))
    assert unknown.startswith("Recommended: ") and answer.name in unknown
    assert "plain decoding" not in unknown


def test_vllm_s_command_has_vllm_s_time_beside_the_runtime_s(page: AppTest) -> None:
    page.run()
    assert re.search(r"Predicted for this command: [\d.]+ ms per token", shown(page))
    assert "All times above are of the backend ridgeplan." in shown(page)
    carried = page.table[0].value
    assert [*carried] == ["part", "in the plan", "in vLLM"]
    assert all(text.endswith(" the same result") for text in carried["in vLLM"])


def test_the_best_of_all_stands_beside_the_plan_that_runs(page: AppTest) -> None:
    """The table of reasons, which has the words of `plan --all`."""
    page.run()
    answer = planner.recommend("meta-llama/Llama-3.1-8B", "h200", "120k")
    why = page.table[1].value.iloc[:, 0]
    assert [sentence(what) for what, _ in reasons(answer)] == list(why.index)
    assert answer.best_estimated and answer.best_estimated.preset in why["Fastest estimated"].replace("\\", "")
    assert plain_words(answer.plan) in why["Recommended"].replace("\\", "")
    assert plain_words(answer.alternatives[0].plan) in shown(page).partition("The next best plans")[2]
    page.selectbox(key="objective").set_value("memory").run()
    assert page.table[1].value.iloc[:, 0]["Fastest estimated"] == "no plan that is only estimated is faster"


def test_the_share_of_the_memory_is_an_input(page: AppTest) -> None:
    page.run()
    page.slider(key="memory_utilization").set_value(0.5).run()
    assert "of 75.4 GB that plans may use" in shown(page)  # half of the catalog's 150.8 GB


def test_the_copied_command_gives_the_plan_that_is_shown(
    page: AppTest, invoke: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = downloads(monkeypatch)
    page.run()
    page.text_input(key="context").set_value("20k")
    page.text_input(key="batch").set_value("8")
    page.text_input(key="new_tokens").set_value("512")
    page.text_input(key="memory_limit").set_value("70GB")
    page.selectbox(key="quality").set_value("lossy")
    page.selectbox(key="objective").set_value("total").run()
    result = invoke(*command(page)[1:], "--json")
    assert result.exit_code == 0, result.output
    assert Plan.from_dict(json.loads(result.stdout)["plan"]) == read_plan(offered[-1][1]).plan


def test_sizes_are_copied_in_the_units_that_the_terminal_reads() -> None:
    options = SearchOptions(memory_limit=70e9, host_memory=1.5e9)
    words = shlex.split(PageQuestion("Llama-3.1-8B", "h200", 20_000, options).command())
    assert words[words.index("--memory-limit") + 1 :][:3:2] == ["70GB", "1.5GB"]


def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What download buttons offer: label, text, file name and type of each."""
    offered: list[tuple[str, ...]] = []
    monkeypatch.setattr("streamlit.download_button", lambda *arguments, **_: offered.append(arguments))
    return offered


def test_the_plan_can_be_downloaded(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = downloads(monkeypatch)
    page.run()
    [(_, text, name, mime)] = offered
    assert read_plan(text).plan == planner.recommend("meta-llama/Llama-3.1-8B", "h200", "120k").plan
    assert (name, mime) == ("plan.json", "application/json")


def test_changed_inputs_change_the_answer(page: AppTest) -> None:
    page.run()
    before = page.metric[0].value
    page.text_input(key="context").set_value("2k")
    page.text_input(key="batch").set_value("4")
    page.selectbox(key="model").set_value("Qwen/Qwen3-8B")
    page.selectbox(key="gpu").set_value("rtx4090")
    page.selectbox(key="quality").set_value("exact").run()
    text = shown(page)
    assert "Qwen/Qwen3-8B on rtx4090, 2k tokens of context, batch 4" in text
    assert "rtx4090 is not calibrated" in text
    assert page.metric[0].value != before


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("context", "0", "context is 0; allowed"),
        ("context", "many", "'many' is not a number of tokens; allowed"),
        ("batch", "5000", "batch is 5000; allowed"),
        ("new_tokens", "0", "new_tokens is 0; allowed"),
        ("memory_limit", "24", "is a size without a unit"),
        ("model", "meta-llama/Llama-3.1-9B", "Did you mean meta-llama/Llama-3.1-8B"),
        ("model", "nowhere.gguf", "cannot read nowhere.gguf"),
        ("gpu", "h20o", "unknown GPU 'h20o'"),
        ("gpu", "nowhere.toml", "cannot read nowhere.toml"),
    ],
)
def test_bad_inputs_show_a_message(page: AppTest, key: str, value: str, words: str) -> None:
    page.query_params[key] = value
    page.run()
    assert words in shown(page)
    assert len(page.error) >= 1
    assert not page.metric


def test_all_mistakes_are_listed_at_once(page: AppTest) -> None:
    wrong = {"context": "many", "batch": "-3", "memory_limit": "24", "new_tokens": "0", "model": "nowhere.gguf",
             "gpu": "h20o"}  # fmt: skip
    for key, value in wrong.items():
        page.query_params[key] = value
    page.run()
    (error,) = page.error
    lines = str(error.value).replace("\\", "").splitlines()
    assert len(lines) == len(wrong)
    for words in ("context: 'many' is not", "batch: '-3' is negative; allowed: a positive number", "without a unit",
                  "new_tokens is 0", "nowhere.gguf", "unknown GPU 'h20o'"):  # fmt: skip
        assert sum(words in line for line in lines) == 1, words


def test_messages_hold_no_markup(page: AppTest) -> None:
    """A model's name could make the browser fetch an image."""
    page.query_params["model"] = "![x](http://nowhere/x)"
    page.run()
    assert r"!\[x\](http" in page.error[0].value


def test_a_message_goes_away_with_its_cause(page: AppTest) -> None:
    page.run()
    page.text_input(key="context").set_value("0").run()
    assert page.error
    page.text_input(key="context").set_value("4096").run()
    assert not page.error
    assert charts_of(page) == 2


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


def test_fixes_of_a_length_know_whether_the_rotary_embedding_is_stretched() -> None:
    """Llama-3.1-8B takes 131072 tokens; YaRN stretches that 8 times or more."""
    beyond = PageQuestion("Llama-3.1-8B", "h200", 200_000)
    assert [fix.changes for fix in length_fixes(beyond)] == [{"context": 131_072}, {"yarn": True}]
    stretched = PageQuestion("Llama-3.1-8B", "h200", 200_000, SearchOptions(yarn=True))
    assert length_fixes(stretched) == []
    beyond_both = PageQuestion("Llama-3.1-8B", "h200", 100_000_000)
    assert [fix.changes for fix in length_fixes(beyond_both)] == [{"context": 131_072}]
    assert length_fixes(None) == length_fixes(PageQuestion("no/such model", "h200", 1)) == []


def test_all_mistakes_are_shown_at_once_in_the_main_area(page: AppTest) -> None:
    page.run()
    page.text_input(key="context").set_value("many")
    page.text_input(key="batch").set_value("some")
    page.text_input(key="memory_limit").set_value("24").run()
    [message] = page.main.error
    assert not page.sidebar.error
    assert all(words in str(message.value) for words in ("'many'", "'some'", "a size without a unit"))


def test_the_price_of_tokens_follows_the_price_of_an_hour(page: AppTest) -> None:
    page.run()
    dollars = float(page.metric[5].value.strip("$"))
    per_s = planner.recommend("meta-llama/Llama-3.1-8B", "h200", "120k").predicted.best.tokens_per_s
    listed = load_hardware("h200").dollars_per_hour
    assert dollars == pytest.approx(listed * 1e6 / 3600 / per_s, abs=0.005)
    assert any(f"at \\${listed:.2f} a GPU-hour" in caption.value for caption in page.caption)
    page.number_input(key="price").set_value(2 * listed).run()
    assert float(page.metric[5].value.strip("$")) == pytest.approx(2 * dollars, abs=0.02)
    page.number_input(key="price").set_value(None)
    page.selectbox(key="gpu").set_value("a10g").run()
    assert page.metric[5].value == "unpriced"


def test_a_gguf_file_is_suggested_first_and_is_the_user_s_to_name(page: AppTest) -> None:
    page.query_params.update({"gpu": "rtx4060-laptop", "context": "8k"})
    page.run()
    first, *_ = shown(page).partition("What would work")[2].split(" Quality 4-bit")
    assert "A GGUF file of the model, such as Q4_K_M" in first
    assert "fix_0" not in {button.key for button in page.button} and page.button(key="fix_1").label == "Apply"


def test_notes_name_the_page_s_fields_and_no_options() -> None:
    assert escaped("where engines stop; `yarn=True` stretches it") == "where engines stop; YaRN stretches it"
    assert escaped("allow `backend=vllm+plugin`, `gpus=2`") == "allow Backend vllm+plugin, GPUs 2"
    assert FIELDS.keys() <= vars(SearchOptions()).keys()
