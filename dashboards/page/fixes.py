"""Cards where there is no answer: what is wrong, and the nearest questions that have one, each one click away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import streamlit as st

from ridgeplan.dashboards.page.inputs import PageQuestion, change
from ridgeplan.dashboards.page.text import escaped
from ridgeplan.dashboards.user_errors import about_input
from ridgeplan.planner import NothingFits
from ridgeplan.planner.recommendation import Fix
from ridgeplan.planner.resolution import longest_context
from ridgeplan.roofline.catalog.models import load_shape

LABELS = {"context": "Context {}", "batch": "Batch {}", "gpu": "Use {}", "quality": "Allow {}", "yarn": "Use YaRN",
          "memory_limit": "No memory limit", "host_memory": "Host with {}"}  # fmt: skip


@contextmanager
def problems_shown(page: PageQuestion | None = None) -> Iterator[None]:
    """Shows what is wrong with the user's input where the block finds something; defects pass. page: what was asked."""
    try:
        yield
    except ValueError as error:
        if not about_input(error):
            raise
        _show_problem(error, page)


def _show_problem(error: ValueError, page: PageQuestion | None) -> None:
    """The message, and cards with the fixes."""
    fixes = error.fixes if isinstance(error, NothingFits) else length_fixes(page)
    st.error(escaped(str(error).partition("; allowed: ")[0] if fixes else str(error)))
    if fixes:
        show_fixes(fixes)


def show_fixes(fixes: Sequence[Fix], title: str = "What would work") -> None:
    """A card for each fix, the first of them emphasized."""
    st.markdown(f"#### {title}")
    with st.container(horizontal=True, key="fixes"):
        for place, fix in enumerate(fixes):
            with st.container(border=True, width=250, height="stretch"):
                st.markdown(f"**{escaped(label(fix))}**")
                st.caption(escaped(fix.text))
                st.button("Apply", key=f"fix_{place}", type="primary" if place == 0 else "secondary",
                          on_click=change, args=(dict(fix.changes),), width="stretch")  # fmt: skip


def label(fix: Fix) -> str:
    """A few words for a fix's changes."""
    if "gpu" in fix.changes:  # that a limit of the other machine's memory is gone need not be said
        return LABELS["gpu"].format(fix.changes["gpu"])
    return ", ".join(LABELS[name].format(value) for name, value in fix.changes.items())


def length_fixes(page: PageQuestion | None) -> list[Fix]:
    """For a context that is beyond the model's: its longest, or YaRN, which stretches its rotary embedding."""
    if page is None:
        return []
    try:
        shape = load_shape(page.model)
    except ValueError:  # the model itself is what is wrong
        return []
    longest = longest_context(shape, page.new_tokens, yarn=page.yarn)
    if page.context <= longest:
        return []
    fixes = [Fix({"context": longest}, f"the longest context of {shape.name}")]
    if not page.yarn and page.context <= longest_context(shape, page.new_tokens, yarn=True):
        fixes.append(Fix({"yarn": True}, "stretch the model's rotary embedding, which can cost quality"))
    return fixes
