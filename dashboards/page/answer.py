"""The answer that all tabs show: verdict, command, figures and memory, or the nearest questions that have an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import streamlit as st

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.charts.memory import staircase_text
from ridgeplan.dashboards.page.inputs import PageQuestion, change, escaped
from ridgeplan.planner import NothingFits, Recommendation
from ridgeplan.planner.engines.formats import engine_named
from ridgeplan.planner.plan_file import plan_json
from ridgeplan.planner.quantities import size_text, three_digits, time_text, tokens_text
from ridgeplan.planner.queries.curves import contexts_of, memory_over_contexts, offload_staircase
from ridgeplan.planner.question import Question
from ridgeplan.planner.recommendation import Alternative, Fix
from ridgeplan.planner.render.text import SOURCE_WORDS, plain_words
from ridgeplan.planner.render.verdict import plan_sentence, reasons, sentence, verdict
from ridgeplan.planner.resolution import longest_context
from ridgeplan.roofline.catalog.hardware import listed
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.validation import Mistakes, is_user_error
from ridgeplan.roofline.plan.presets import short_name


@contextmanager
def problems_shown(page: PageQuestion | None = None, show: Callable[[str], Any] = st.error) -> Iterator[None]:
    """Shows the errors of the user's input that the block raises. Defects pass. page: the question, for fixes."""
    try:
        yield
    except ValueError as error:
        if not is_user_error(error):
            raise
        _show_problem(error, page, show)


def _show_problem(error: ValueError, page: PageQuestion | None, show: Callable[[str], Any]) -> None:
    """The message, or a list of all messages, and cards with the fixes."""
    if isinstance(error, Mistakes):
        show("\n".join(f"- {escaped(mistake)}" for mistake in error.mistakes))
        return
    fixes = error.fixes if isinstance(error, NothingFits) else length_fixes(page)
    show(escaped(str(error).partition("; allowed: ")[0] if fixes else str(error)))
    if fixes:
        show_fixes(fixes)


def show_fixes(fixes: Sequence[Fix], title: str = "What would work") -> None:
    """A card for each fix in words; the first that the page can apply is emphasized."""
    first = next((fix for fix in fixes if fix.changes), None)
    st.markdown(f"#### {title}")
    with st.container(horizontal=True, key="fixes"):
        for place, fix in enumerate(fixes):
            with st.container(border=True, width=250, height="stretch"):
                st.markdown(escaped(sentence(fix.text)))
                if fix.changes:
                    st.button("Apply", key=f"fix_{place}", type="primary" if fix is first else "secondary",
                              on_click=change, args=(dict(fix.changes),), width="stretch")  # fmt: skip


def length_fixes(page: PageQuestion | None) -> list[Fix]:
    """For a context that is beyond the model's: its longest, or YaRN, which stretches its rotary embedding."""
    if page is None:
        return []
    try:
        shape = load_shape(page.model)
    except ValueError:  # the model itself is what is wrong
        return []
    longest = longest_context(shape, page.options.new_tokens, yarn=page.options.yarn)
    if page.context <= longest:
        return []
    fixes = [Fix({"context": longest}, f"context {longest}, the longest of {shape.name}")]
    if not page.options.yarn and page.context <= longest_context(shape, page.options.new_tokens, yarn=True):
        fixes.append(Fix({"yarn": True}, "stretch the model's rotary embedding by YaRN, which can cost quality"))
    return fixes


SOURCES_HELP = f"Where figures come from: {'; '.join(map(', '.join, SOURCE_WORDS.items()))}."
MEMORY_POINTS = 64
NEXT_PLANS = 8  # in the table of why
PRICE_SHOWN = "price_shown"  # in the session: the Capacity tab's price, as the tile has it


@dataclass(frozen=True)
class Answer:
    """The page's question, the planner's form of it, and the recommendation."""

    page: PageQuestion
    question: Question
    recommendation: Recommendation

    @classmethod
    def to(cls, page: PageQuestion) -> Answer:
        """Raises a ValueError that says what to change."""
        recommendation = page.answer()
        return cls(page, page.to_question(recommendation.plan.parallel), recommendation)


def show_head(answer: Answer) -> None:
    """The verdict with its confidence, a command, six figures, and memory over the context."""
    recommendation = answer.recommendation
    st.markdown(f"### {escaped(verdict(recommendation))}")
    st.markdown(escaped(plan_sentence(recommendation)))
    st.caption(escaped(subject(recommendation)), help=SOURCES_HELP)
    if recommendation.on_device:
        show_fixes(recommendation.on_device, "What would fit the GPU alone")
    _show_tiles(answer)
    for note in recommendation.notes:
        st.warning(escaped(note))
    left, right = st.columns((3, 2))
    with left:
        _show_memory(answer)
    with right:
        _show_actions(answer)
    with st.expander("For vLLM", key="vllm"), problems_shown(show=st.warning):
        _show_engine(answer)
    with st.expander("Why this plan", key="why"):
        _show_why(answer)


def subject(recommendation: Recommendation) -> str:
    """The workload, and what the figures rest on."""
    workload, predicted = recommendation.plan.workload, recommendation.predicted
    return (
        f"{workload.model} on {workload.devices}, {tokens_text(workload.context)} tokens of context, "
        f"batch {workload.batch}. Figures are {predicted.source}. Ranges hold with 90% probability."
    )


def tiles(recommendation: Recommendation, dollars_per_hour: float) -> list[tuple[str, str, str]]:
    """Label, value and band of the six figures. dollars_per_hour: of a GPU; 0 if nobody knows."""
    best, low, high = recommendation.predicted.best, recommendation.predicted.low, recommendation.predicted.high
    batch, limit = recommendation.plan.workload.batch, recommendation.memory_limit_bytes
    whose = "of the batch" if batch > 1 else "of the request"
    gpus = recommendation.plan.workload.parallel.gpus
    last = f"of a request; {time_text(best.ttft_ms)} of the batch's last"
    return [
        ("Time per token", time_text(best.tpot_ms), f"{time_text(low.tpot_ms)} to {time_text(high.tpot_ms)}"),
        ("First token", time_text(best.ttft_request_ms),
         last if batch > 1 else f"{time_text(low.ttft_ms)} to {time_text(high.ttft_ms)}"),
        ("Tokens/s", three_digits(best.tokens_per_s),
         f"{whose}; {three_digits(low.tokens_per_s)} to {three_digits(high.tokens_per_s)}"),
        ("Speed-up", f"{recommendation.predicted.speedup:.2f}x",
         f"{time_text(recommendation.baseline.best.tpot_ms)} by {recommendation.baseline_text}"),
        ("Peak memory", size_text(best.peak_memory_bytes), f"of {size_text(limit)} that plans may use"),
        ("1M new tokens", f"${gpus * dollars_per_hour * 1e6 / 3600 / best.tokens_per_s:,.2f}",
         f"at ${dollars_per_hour:.2f} a GPU-hour, without prompts") if dollars_per_hour else
        ("1M new tokens", "unpriced", "the catalog has no price of this GPU; the Capacity tab takes yours"),
    ]  # fmt: skip


def _show_tiles(answer: Answer) -> None:
    typed = st.session_state[PRICE_SHOWN] = st.session_state.get("price")
    price = typed or listed(answer.question.profile.hardware).dollars_per_hour
    with st.container(horizontal=True, key="tiles"):
        for label, value, band in tiles(answer.recommendation, price):
            with st.container(border=True, width=150, height="stretch", gap="xsmall"):
                st.metric(label, value)
                st.caption(escaped(band))


def _show_memory(answer: Answer) -> None:
    recommendation, question = answer.recommendation, answer.question
    contexts = contexts_of(question, MEMORY_POINTS)
    memory = memory_over_contexts(recommendation.plan, question, contexts)
    staircase = offload_staircase(recommendation.plan, question)
    figure = charts.memory_over_context(
        contexts, memory, question.memory_limit_bytes, question.workload.context, staircase
    )  # fmt: skip
    st.markdown("**Memory over the context**")
    st.plotly_chart(figure, key="memory", alt="Memory by purpose over the context, against the capacity")
    st.caption(staircase_text(staircase, contexts[-1]))


def _show_actions(answer: Answer) -> None:
    recommendation, question = answer.recommendation, answer.question
    plan_file = plan_json(recommendation.plan, question.shape, question.profile, recommendation.backend)
    st.markdown("**The same in a terminal**")
    st.code(answer.page.command(), language="bash", wrap_lines=True)
    st.download_button("Download the plan", plan_file, "plan.json", "application/json", type="primary",
                       icon=":material/download:", on_click="ignore")  # fmt: skip


def _show_engine(answer: Answer) -> None:
    """vLLM's command for the plan, and what of the plan it does not carry, across the page. Raises as `export` does."""
    from ridgeplan.planner.export import ServeCommandOptions, export, schema_for  # imports yaml

    shape, schema = answer.question.shape, schema_for("vllm")
    options = ServeCommandOptions(
        answer.recommendation.plan, getattr(shape, "whole", shape), answer.question.profile, engine_named("vllm"),
        schema, shape.name,
    )  # fmt: skip
    exported = export(options)
    st.code(exported.command.shell(), language="bash", wrap_lines=True)
    times, backend = exported.times, answer.recommendation.backend
    speed = f"{time_text(times.tpot_ms)} per token ({times.source})" if times else f"none, as {exported.unpredicted}"
    st.markdown(escaped(f"Predicted for this command: {speed}. All times above are of the backend {backend}."))
    rows = [{"part": axis.axis, "in the plan": axis.plan,
             f"in {exported.engine}": f"{axis.engine}; {'' if axis.exact else 'not '}the same result"}
            for axis in exported.carried]  # fmt: skip
    st.table([{name: escaped(text) for name, text in row.items()} for row in rows], border="horizontal")
    for rule in exported.rules:
        st.caption(escaped(rule.says))


def _show_why(answer: Answer) -> None:
    """The reasons in words, and the next plans of the ranking with what each lacks, across the page."""
    rows = {sentence(name): escaped(text) for name, text in reasons(answer.recommendation)}
    st.table(rows, border="horizontal")
    st.markdown("**The next best plans**")
    others = answer.recommendation.alternatives[:NEXT_PLANS]
    st.markdown("\n".join(f"- **{escaped(row['plan'])}**: {escaped(_plan_line(row))}" for row in _plan_rows(others)))


def _plan_line(row: Mapping[str, Any]) -> str:
    """A row of `_plan_rows` as text, which a phone can wrap."""
    figures = f"{row['ms per token']:.3g} ms per token, {row['speed-up']:.2f}x, {row['peak GB']:.3g} GB"
    return f"{figures}; {row['why not']}. It has {row['what it changes']}."


def show_alternatives(answer: Answer) -> None:
    """All other plans with their bands, and why each was not chosen."""
    recommendation = answer.recommendation
    st.plotly_chart(charts.alternatives(recommendation), key="alternatives", alt="Time per token of all plans")
    st.dataframe(_plan_rows(recommendation.alternatives), key="reasons", hide_index=True)


def _plan_rows(plans: Sequence[Alternative]) -> list[dict[str, Any]]:
    """Rows of a table of plans, with what each changes in plain words."""
    return [
        {"plan": short_name(other.preset), "ms per token": round(other.predicted.best.tpot_ms, 3),
         "speed-up": round(other.predicted.speedup, 2),
         "peak GB": round(other.predicted.best.peak_memory_bytes / 1e9, 2), "why not": other.rejected,
         "source": other.predicted.source, "what it changes": plain_words(other.plan)}
        for other in plans
    ]  # fmt: skip
