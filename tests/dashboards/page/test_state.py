"""What the page keeps: inputs in the URL, texts and sliders that say the same, and cards that change them."""

import pytest
from streamlit.testing.v1 import AppTest

from ridgeplan import planner
from ridgeplan.dashboards import app
from ridgeplan.dashboards.page.inputs import escaped
from ridgeplan.planner import NothingFits
from ridgeplan.planner.render.verdict import sentence

pytestmark = pytest.mark.usefixtures("questions_answered_once")
MODEL = "meta-llama/Llama-3.1-8B"


def opened(**url: str) -> AppTest:
    """The page at a URL with these parameters; else at a tab that searches for no map of all sizes."""
    page = AppTest.from_file(app.__file__, default_timeout=300)
    for name, value in ({"tab": "Validation"} | url).items():
        page.query_params[name] = value
    page.run()
    assert not page.exception
    return page


def command_line(page: AppTest) -> str:
    """The command's arguments."""
    return str(page.code[0].value)


def verdict(page: AppTest) -> str:
    """The sentence above everything, without Markdown's escapes."""
    return str(page.markdown[0].value).replace("\\", "")


def press(page: AppTest, place: int) -> None:
    page.button(key=f"fix_{place}").click().run()
    assert not page.exception


def test_a_url_asks_its_question() -> None:
    page = opened(model="Qwen/Qwen3-8B", gpu="h100-sxm", context="16k", batch="4", new_tokens="256", quality="exact")
    words = "ridgeplan plan Qwen/Qwen3-8B --gpu h100-sxm --ctx 16384 --batch 4 --new-tokens 256 --quality exact"
    assert command_line(page) == words


def test_values_of_a_url_that_are_not_allowed_are_ignored() -> None:
    page = opened(quality="<script>", memory_utilization="7")
    assert not page.error
    assert command_line(page) == f"ridgeplan plan {MODEL} --gpu h200 --ctx 122880"


@pytest.mark.parametrize(("text", "tokens"), [("128k", 131_072), ("65_536", 65_536), ("32,768", 32_768)])
def test_a_context_is_read_as_people_write_it(text: str, tokens: int) -> None:
    assert f"--ctx {tokens}" in command_line(opened(context=text))


def test_a_slider_stands_where_its_text_does_and_writes_it() -> None:
    page = opened()
    assert page.text_input(key="context").value == "120k"
    assert page.select_slider(key="context_slider").value == 122_880
    page = opened(context="100000")
    assert page.select_slider(key="context_slider").value == 100_000
    page.select_slider(key="context_slider").set_value(65_536).run()
    assert page.text_input(key="context").value == "64k"
    assert "--ctx 65536" in command_line(page)


TIGHT = (
    {"memory_limit": "10GB"},
    pytest.param(  # nor would it without the limit
        {"model": "mistralai/Mixtral-8x22B-v0.1", "context": "32k", "memory_limit": "100GB"}, marks=pytest.mark.slow
    ),
    pytest.param({"batch": "4000"}, marks=pytest.mark.slow),
    pytest.param({"gpu": "rtx4060-laptop", "context": "64k", "batch": "16"}, marks=pytest.mark.slow),
)


@pytest.mark.parametrize("url", TIGHT, ids=str)
def test_every_card_leads_to_an_answer(url: dict[str, str]) -> None:
    """One click each, from the same question where nothing fits."""
    page = opened(**url)
    assert "nothing fits" in page.error[0].value
    assert not page.metric
    cards = [element for element in page.button if str(element.key).startswith("fix_")]
    assert cards
    for place in range(len(cards)):
        page = opened(**url) if place else page
        press(page, place)
        assert not page.error, f"{url}, card {place}"
        assert len(page.metric) == 6


def test_cards_are_the_planner_s_fixes() -> None:
    with pytest.raises(NothingFits) as caught:
        planner.recommend(MODEL, "h200", "120k", memory_limit="10GB")
    page = opened(memory_limit="10GB")
    shown = [str(element.value).replace("\\", "") for element in page.markdown]
    fixes = [escaped(sentence(fix.text)).replace("\\", "") for fix in caught.value.fixes]
    assert fixes == shown[-len(caught.value.fixes) :]
    assert "--" not in "".join(shown)


def test_what_does_not_fit_the_gpu_alone_has_the_cards_of_what_would() -> None:
    """The verdict begins with it, and every card leads to an answer that does not."""
    url = {"context": "128k", "batch": "20"}
    recommendation = planner.recommend(MODEL, "h200", "128k", batch=20)
    page = opened(**url)
    assert recommendation.warning and recommendation.warning in verdict(page)
    cards = [str(element.key) for element in page.button if str(element.key).startswith("fix_")]
    assert len(cards) == len(recommendation.on_device) > 0
    for place in (0, len(cards) - 1):
        page = opened(**url) if place else page
        press(page, place)
        assert "Does not fit" not in verdict(page)


def test_the_memory_of_the_host_is_an_input() -> None:
    """Layers that the usual memory has room for do not fit a host with 20 GB; a card says how much it takes."""
    page = opened(context="64k", batch="8", gpu="rtx5090", host_memory="2GB")
    assert "nothing fits" in page.error[0].value
    places = [place for place, element in enumerate(page.markdown) if "of the host" in str(element.value)]
    assert len(places) == 1
    last = max(
        int(str(element.key).removeprefix("fix_")) for element in page.button if str(element.key).startswith("fix_")
    )
    press(page, last)
    assert "--host-memory" in command_line(page)
    assert "Does not fit the GPU alone" in verdict(page)


def test_a_context_beyond_the_model_s_has_cards_too() -> None:
    page = opened(context="200000")
    assert "context 200000 is beyond the limit" in page.error[0].value
    press(page, 0)
    assert "--ctx 131072" in command_line(page)
    page = opened(context="200000")
    press(page, 1)
    assert command_line(page).endswith("--ctx 200000 --yarn")
    assert any("stretched 2x by YaRN" in str(element.value) for element in page.warning)


def test_the_map_is_there_even_if_nothing_fits_what_is_asked() -> None:
    page = opened(batch="4000", tab="Capacity")
    assert [tab.label for tab in page.tabs] == ["Capacity", "Traffic", "Papers", "Validation"]
    assert len(page.get("plotly_chart")) == 1
