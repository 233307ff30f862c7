"""The Streamlit page of `ridgeplan dashboard`: ask for a plan, see why it is the best, download it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import streamlit as st

from ridgeplan.dashboards.cli.dashboard import FOLDER_VARIABLE
from ridgeplan.dashboards.page import papers, plans, rounds, traffic, validation
from ridgeplan.dashboards.page.answer import Answer, problems_shown, show_head
from ridgeplan.dashboards.page.inputs import IN_URL, PageQuestion, ask_question

# Tabs that show an answer, a question that may have none, or neither.
ANSWERED: dict[str, Callable[[Answer], None]] = {
    "Compare": plans.show_compare, "Trade-offs": plans.show_trade_offs, "Breakdown": rounds.show_breakdown,
    "Speculation": rounds.show_speculation,
}  # fmt: skip
# Less space above the page, figures that fit tiles of which a phone shows two side by side, and cells of tables as wide
# as the page. Phones get words on what is beyond the edge of a table, and behind the arrow above the page. Where
# nothing hovers, plotly's buttons would cover a figure for good.
STYLE = """<style>
.stMainBlockContainer { padding-top: 3.5rem; padding-bottom: 2rem; }
.st-key-tiles > * { flex: 1 1 7.5rem; }
.st-key-tiles [data-testid="stMetricValue"] { font-size: 1.6rem; }
[data-testid="stTableStyledTable"] td * { max-width: none !important; }
@media (hover: none) { .modebar { display: none; } }
@media (max-width: 640px) {
  [data-testid="stTableStyledTable"] :is(td, th) { padding: 0.25rem; overflow-wrap: anywhere; }
  [data-testid="stDataFrame"]::after { content: "Swipe the table for more columns."; opacity: 0.6; font-size: 0.8rem; }
  [data-testid="stExpandSidebarButton"]::after { content: "Change the question"; white-space: nowrap; }
}
</style>"""


def main() -> None:
    """One run of the page; Streamlit reruns it whenever an input changes."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):  # it was removed since
            os.chdir(folder)
    st.set_page_config(page_title="ridgeplan", layout="wide")
    st.html(STYLE)
    shown = dict(_tabs())
    for tab, show in zip(st.tabs(list(shown), key="tab", bind=IN_URL), shown.values(), strict=True):
        if tab.open:
            with tab:
                _show_tab(show)


@st.fragment
def _show_tab(show: Callable[[], None]) -> None:
    """A tab's content. Its inputs rerun this tab only, without another search of the planner."""
    with problems_shown():
        show()


def _tabs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Shows the sidebar and the answer, or the error; yields the tabs that can be shown."""
    page: PageQuestion | None = None
    answer: Answer | None = None
    with st.sidebar:
        inputs = ask_question()
    with problems_shown():
        page = inputs.question()
    if page:
        with problems_shown(page):
            answer = Answer.to(page)
            show_head(answer)
        yield "Capacity", partial(plans.show_capacity, page)
        yield "Traffic", partial(traffic.show_traffic, page)
    if answer:
        for name, show in ANSWERED.items():
            yield name, partial(show, answer)
    yield "Papers", papers.show
    yield "Validation", validation.show


if __name__ == "__main__":
    main()
