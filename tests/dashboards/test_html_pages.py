"""The HTML of a suite's results: it holds everything and loads nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from suite_results import REGRET, REPORT, ROW

from ridgeplan.dashboards.charts.results import errors, regrets, scatter
from ridgeplan.dashboards.html_pages import table, validation_page
from ridgeplan.validate.suite.report import SuiteReport, summaries


def html_of(report: SuiteReport) -> str:
    return validation_page(report.to_dict(), [summary.to_dict() for summary in summaries(report)])


class Elements(HTMLParser):
    """The elements with their attributes, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.text += data


@pytest.fixture(scope="module")
def html() -> str:
    return html_of(REPORT)


def test_nothing_is_loaded(html: str) -> None:
    elements = Elements(html).found
    loading = {"src", "href", "data", "srcset", "poster", "action"}
    assert not [element for element in elements if loading & element[1].keys()]
    assert {"link", "img", "iframe", "object", "embed", "base"}.isdisjoint(tag for tag, _ in elements)
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in styles and "@import" not in styles
    policy = next(attributes["content"] for tag, attributes in elements if tag == "meta" and "content" in attributes)
    assert policy is not None and "default-src 'none'" in policy and "http" not in policy


def test_figures_have_their_code_once(html: str) -> None:
    assert html.count("Plotly.newPlot(") >= 3  # a scatter, the errors, the regret
    assert html.count("plotly.js v") == 1


def test_the_page_shows_the_summary_the_rows_and_the_method(html: str) -> None:
    text = Elements(html).text
    for words in ("plain step", "+10.0%", "20.0%", "missed", "by the clock", "a case: why", "quantspec, gamma 3"):
        assert words in text


def test_texts_of_a_report_are_text(html: str) -> None:
    wicked = "<script>alert(1)</script><img src=x>"
    report = replace(
        REPORT, device=wicked, skipped=(wicked,), methods={"steps": wicked, "regret": "how"},
        rows=(replace(ROW, model=wicked, case=wicked, kind=wicked),),
        regret=(replace(REGRET, model=wicked, best=wicked),),
    )  # fmt: skip
    elements, honest = Elements(html_of(report)), Elements(html)
    assert [tag for tag, _ in elements.found].count("script") == [tag for tag, _ in honest.found].count("script")
    assert "img" not in [tag for tag, _ in elements.found]
    assert elements.text.count(wicked) >= 4


def test_a_part_without_rows_or_regret_has_no_empty_figures() -> None:
    only_rows, only_regret = replace(REPORT, regret=()), replace(REPORT, rows=())
    assert "Regret of" not in html_of(only_rows)
    assert "Largest errors" not in html_of(only_regret)


def test_a_scatter_has_a_point_per_row_and_the_errors_are_in_percent() -> None:
    rows = [row.to_dict() for row in (ROW, replace(ROW, kind="draft step", predicted=0.5))]
    points = {trace.name: (trace.x, trace.y) for trace in scatter(rows, "ms").data if trace.name}
    assert points == {"plain step": ((1.0,), (1.1,)), "draft step": ((1.0,), (0.5,))}
    assert [trace.x[0] for trace in errors(rows).data] == [pytest.approx(10), pytest.approx(-50)]
    assert regrets([REGRET.to_dict()]).data[0].x[0] == pytest.approx(20)


def test_cells_are_escaped_and_figures_are_marked() -> None:
    assert table(("a",), [("<b>",)]).endswith("<td>&lt;b&gt;</td></tr></tbody></table>")
    assert '<td class="figure">+1.0%</td>' in table(("a",), [("+1.0%",)])
