"""The page in a browser: sliders, cards, the URL, the plan that it offers, and how it looks on phones and at night."""

import re
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner.plan_file import read_plan

TABS = ("Capacity", "Traffic", "Compare", "Trade-offs", "Breakdown", "Speculation", "Papers", "Validation")
CHARTED = [name for name in TABS if name != "Validation"]
TALLEST = 3000  # pixels of an opened expander on a phone, which shows 900 at once
LOCAL = ("http://127.0.0.1:", "data:", "blob:")
# Text of a chart that must stay legible: ticks, titles, legends.
LABELS = ".xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .legendtitletext"
BOXES = """(labels) => [...document.querySelectorAll('.js-plotly-plot')].map(
    chart => [...chart.querySelectorAll(labels)].map(one => {
        const box = one.getBoundingClientRect();
        return {text: one.textContent, left: box.left, right: box.right, top: box.top, bottom: box.bottom};
    }))"""


def opened(context: Any, url: str) -> Any:
    """A page that has finished."""
    page = context.new_page()
    page.goto(url)
    settled(page)
    return page


def settled(page: Any) -> None:
    page.wait_for_selector('[data-testid="stTabs"]')
    page.wait_for_function(
        """() => !document.querySelector('[data-testid=stStatusWidget], [data-testid=stSpinner], [data-stale=true]')
        && document.querySelectorAll('.js-plotly-plot .main-svg').length > 0"""
    )
    page.wait_for_timeout(700)  # charts fade in
    assert page.locator('[data-testid="stException"]').count() == 0


def verdict(page: Any) -> str:
    return str(page.locator("h3").first.inner_text())


def ridgeplan(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from ridgeplan.dashboards.cli import main; main()"
    return subprocess.run([sys.executable, "-P", "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_from_a_slider_over_a_card_to_a_plan(server: Any, context: Any, tmp_path: Path) -> None:
    page = opened(context, server.url)
    first = verdict(page)
    slider = page.locator(".st-key-context_slider input[type=range]")
    slider.focus()
    slider.press("ArrowLeft")  # from 120k to 96k
    page.wait_for_url(re.compile("context=96k"))
    settled(page)
    assert verdict(page) != first
    page.reload()
    settled(page)
    assert page.get_by_role("textbox", name="Context (tokens)").input_value() == "96k"

    batch = page.get_by_role("textbox", name="Batch")
    batch.fill("4000")
    batch.press("Enter")
    page.get_by_text("What would work").wait_for()
    page.get_by_role("button", name="Apply").first.click()
    page.locator("[data-testid=stMetric]").first.wait_for()
    settled(page)

    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the plan").click()
    path = tmp_path / "plan.json"
    waiting.value.save_as(path)
    plan = read_plan(path.read_bytes()).plan
    assert plan.workload.context == 96 << 10
    assert 1 < plan.workload.batch < 4000
    explanation = ridgeplan("explain", path)
    assert explanation.returncode == 0, explanation.stderr
    assert "Llama-3.1-8B" in explanation.stdout
    command = page.locator("[data-testid=stCode]").first.inner_text()
    result = ridgeplan(*command.split()[1:], "-o", tmp_path / "again.json")
    assert result.returncode == 0, result.stderr
    assert read_plan((tmp_path / "again.json").read_bytes()).plan == plan


def test_the_page_asks_no_other_machine(server: Any, context: Any) -> None:
    others: list[str] = []
    context.on("request", lambda item: others.append(item.url) if not item.url.startswith(LOCAL) else None)
    for name in TABS:
        page = opened(context, f"{server.url}/?tab={name}")
        page.close()
    assert not others


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_is_legible(server: Any, context: Any, scheme: str) -> None:
    """Nothing is wider than the screen, no label overprints another, and the background is light or dark as asked."""
    for name in CHARTED:
        page = opened(context, f"{server.url}/?tab={name}")
        main = page.locator('[data-testid="stMain"]')
        assert main.evaluate("one => one.scrollWidth <= one.clientWidth"), name
        color = page.locator('[data-testid="stApp"]').evaluate("one => getComputedStyle(one).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", color)[:3])) < 100) == (scheme == "dark")
        overprinted = [
            pair for chart in page.evaluate(BOXES, LABELS) for pair in combinations(chart, 2) if cross(*pair)
        ]
        assert not [(item["text"], other["text"]) for item, other in overprinted], name
        page.close()


@pytest.mark.parametrize("width", [390, 1440])
def test_expanders_open_with_all_that_they_hold(server: Any, context: Any) -> None:
    """Without another run of the page, and no wider than the screen."""
    page = opened(context, f"{server.url}/?tab=Papers")
    context.set_offline(True)  # nothing more arrives
    for title, content in (("For vLLM", "vllm serve"), ("Why this plan", "The next best plans")):
        page.get_by_text(title).first.click()
        page.get_by_text(content).first.wait_for()
    main = page.locator('[data-testid="stMain"]')
    assert main.evaluate("one => one.scrollWidth <= one.clientWidth")
    wide = page.locator('[data-testid="stTable"]').evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth + 1 || [...one.querySelectorAll('table')]"
        ".some(table => table.scrollWidth > one.clientWidth + 1)).map(one => one.innerText)"
    )
    assert not wide
    heights = page.locator('[data-testid="stExpander"]').evaluate_all("all => all.map(one => one.clientHeight)")
    assert max(heights) < TALLEST
    context.set_offline(False)


@pytest.mark.parametrize("tab", ["Compare", "Compare&compare=Models", "Compare&compare=Plans", "Trade-offs"])
def test_no_column_is_beyond_the_edge_of_a_wide_screen(server: Any, context: Any, tab: str) -> None:
    page = opened(context, f"{server.url}/?tab={tab}")
    tables = page.locator('[data-testid="stDataFrame"] .dvn-scroller')
    hidden = tables.evaluate_all("all => all.map(one => one.scrollWidth - one.clientWidth)")
    assert hidden and max(hidden) <= 1


def cross(first: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two boxes share more than a margin of two pixels."""
    return all(
        min(first[end], other[end]) - max(first[start], other[start]) > 2
        for start, end in (("left", "right"), ("top", "bottom"))
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_closing_the_terminal_ends_the_server(server: Any, context: Any, number: int) -> None:
    other_server = type(server)()
    opened(context, other_server.url)
    other_server.end(number)
    with pytest.raises(Exception, match="ERR_CONNECTION_REFUSED"):
        context.new_page().goto(other_server.url)
