"""The Streamlit page of `ridgeplan dashboard`: ask for a plan, see why it is the best, download it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import streamlit as st

from ridgeplan import planner
from ridgeplan.dashboards import charts
from ridgeplan.dashboards.user_errors import about_input
from ridgeplan.planner import Recommendation
from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.search import Objective
from ridgeplan.roofline.catalog.hardware import Hardware, list_hardware
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import GIB

DEFAULT_MODEL, DEFAULT_GPU, DEFAULT_CONTEXT = "meta-llama/Llama-3.1-8B", "h200", 120_000
THIS_MACHINE = "auto"


@dataclass(frozen=True)
class PageQuestion:
    """The sidebar's inputs, as typed."""

    model: str
    gpu: str
    context: int
    batch: int
    new_tokens: int
    quality: str
    objective: str
    memory_utilization: float
    memory_limit_gib: float
    yarn: bool

    def answer(self) -> Recommendation:
        """The recommendation. Raises a ValueError that says what to change."""
        return planner.recommend(
            self.model,
            self.gpu,
            self.context,
            batch=self.batch,
            new_tokens=self.new_tokens,
            quality=self.quality,
            objective=self.objective,
            memory_utilization=self.memory_utilization,
            memory_limit=self.memory_limit_gib * GIB or None,
            yarn=self.yarn,
        )


def main() -> None:
    """One run of the page; Streamlit reruns it whenever an input changes."""
    st.set_page_config(page_title="ridgeplan", layout="wide")
    with st.sidebar:
        question = ask()
    try:
        recommendation = question.answer()
        shape, profile = planner.resolve(question.model, question.gpu)
    except ValueError as error:
        if not about_input(error):
            raise
        st.error(escaped(str(error)))
        return
    show_plan(recommendation, shape)
    show_charts(recommendation, profile.hardware)
    show_alternatives(recommendation)


def ask() -> PageQuestion:
    """The inputs, which the planner validates."""
    models = [shape.name for shape in list_models()]
    gpus = [*(item.name for item in list_hardware()), THIS_MACHINE]
    model = st.selectbox("Model", models, index=models.index(DEFAULT_MODEL), key="model")
    own_model = st.text_input("Other model", key="own_model", help="A config.json, a GGUF file, or a cached hub id.")
    gpu = st.selectbox("GPU", gpus, index=gpus.index(DEFAULT_GPU), key="gpu",
                       help="auto is this machine, once `ridgeplan calibrate` has run.")  # fmt: skip
    own_gpu = st.text_input("Other GPU", key="own_gpu", help="A TOML file with the figures of one GPU.")
    return PageQuestion(
        model=own_model.strip() or model,
        gpu=own_gpu.strip() or gpu,
        context=int(st.number_input("Context (tokens)", value=DEFAULT_CONTEXT, step=1024, key="context")),
        batch=int(st.number_input("Batch", value=1, step=1, key="batch")),
        new_tokens=int(st.number_input("New tokens", value=1024, step=128, key="new_tokens")),
        quality=st.selectbox("Quality", [*map(str, Quality)], index=1, key="quality"),
        objective=st.selectbox("Objective", [*map(str, Objective)], key="objective"),
        memory_utilization=st.number_input("Memory utilization", value=MEMORY_UTILIZATION, step=0.05,
                                           key="memory_utilization", help="Share of the memory that may be used."),
        memory_limit_gib=st.number_input("Memory limit (GiB)", value=0.0, step=1.0, key="memory_limit",
                                         help="Where that is less than this share; 0 is no other limit."),
        yarn=st.checkbox("YaRN beyond the model's limit", key="yarn"),
    )  # fmt: skip


def escaped(text: str) -> str:
    """`text` for Markdown to show as it is: names from files could hold links, images or formulas."""
    return re.sub(r"([\\`*_\[\]<>$~])", r"\\\1", text)


def show_plan(recommendation: Recommendation, shape: ModelShape) -> None:
    """The plan's name, its headline figures with their bands, the reasons, and the download."""
    predicted, workload = recommendation.predicted, recommendation.plan.workload
    best, low, high = predicted.best, predicted.low, predicted.high
    st.title(recommendation.name)
    about = (
        f"{workload.model} ({shape.parameters / 1e9:.3g}B) on {workload.hardware}, {workload.context} tokens of context"
    )
    st.caption(escaped(f"{about}, batch {workload.batch} · figures are {predicted.source}, with their band"))
    cells = (
        ("Time per token", f"{best.tpot_ms:.3g} ms", f"{low.tpot_ms:.3g} to {high.tpot_ms:.3g}"),
        ("Time to first token", f"{best.ttft_ms / 1e3:.3g} s", f"{low.ttft_ms / 1e3:.3g} to {high.ttft_ms / 1e3:.3g}"),
        ("Tokens per second", f"{best.tokens_per_s:.4g}", f"{low.tokens_per_s:.4g} to {high.tokens_per_s:.4g}"),
        ("Speed-up", f"{predicted.speedup:.2f}x", f"plain decoding {recommendation.baseline.best.tpot_ms:.3g} ms"),
        ("Peak memory", f"{best.peak_memory_bytes / GIB:.1f} GiB", f"of {recommendation.memory_limit_bytes / GIB:.1f}"),
    )
    for column, (label, value, band) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value)
        column.caption(band)
    st.markdown(escaped(f"Best of all, whether it runs or not: {best_of_all(recommendation)}"))
    for note in recommendation.notes:
        st.warning(escaped(note))
    with st.expander("Why this plan", expanded=True):
        st.code(recommendation.explain(), language=None, wrap_lines=True)
    st.download_button("Download the plan", recommendation.plan.to_json(), "plan.json", "application/json")


def best_of_all(recommendation: Recommendation) -> str:
    """The best plan that is only estimated, beside the one that runs."""
    other = recommendation.best_estimated
    if other is None:
        return f"{recommendation.name}, the plan above"
    speed = f"{other.predicted.best.tpot_ms:.3g} ms per token, {other.predicted.speedup:.2f}x plain decoding"
    return f"{other.preset}, {speed}; {other.rejected}"


def show_charts(recommendation: Recommendation, hardware: Hardware) -> None:
    """Charts of time and memory."""
    predictions = {recommendation.name: recommendation.predicted, charts.PLAIN: recommendation.baseline}
    st.subheader("Time per token")
    st.plotly_chart(charts.round_breakdown(recommendation), key="round")
    left, right = st.columns(2)
    left.subheader("Memory")
    left.plotly_chart(charts.memory_bars(predictions, recommendation.memory_limit_bytes), key="memory")
    right.subheader("Roofline")
    right.plotly_chart(charts.roofline(recommendation.predicted, hardware), key="roofline")


def show_alternatives(recommendation: Recommendation) -> None:
    """All other plans, and why each was not chosen."""
    st.subheader("Alternatives")
    st.plotly_chart(charts.alternatives(recommendation), key="alternatives")
    st.dataframe(
        [
            {
                "plan": other.preset,
                "ms per token": round(other.predicted.best.tpot_ms, 3),
                "speed-up": round(other.predicted.speedup, 2),
                "peak GiB": round(other.predicted.best.peak_memory_bytes / GIB, 2),
                "source": other.predicted.source,
                "why not": other.rejected,
            }
            for other in recommendation.alternatives
        ],
        key="reasons",
        hide_index=True,
    )


if __name__ == "__main__":
    main()
