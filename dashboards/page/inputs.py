"""The sidebar: the page's question. Every input is a parameter of the URL, so that a link or a reload keeps it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from ridgeplan import planner
from ridgeplan.planner import PlanError, Recommendation, SearchOptions
from ridgeplan.planner.capacity import HOST_MEMORY_BYTES, MEMORY_UTILIZATION
from ridgeplan.planner.parallelism import choose_degrees
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.quantities import count, size_bytes, size_text, tokens, tokens_text
from ridgeplan.planner.question import Objective, Question, ask
from ridgeplan.planner.recommend import best_plan
from ridgeplan.planner.resolution import resolve
from ridgeplan.roofline.catalog.hardware import list_hardware
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.validation import together, with_names
from ridgeplan.roofline.plan.plan import MAX_BATCH, Workload
from ridgeplan.roofline.plan.support import Backend

IN_URL = "query-params"
DEFAULT_MODEL, DEFAULT_GPU, DEFAULT_CONTEXT = "meta-llama/Llama-3.1-8B", "h200", "120k"
THIS_MACHINE = "auto"
MODEL_HELP = "Choose one, or type a config.json, a GGUF file, or a hub id."
GPU_HELP = (
    "Choose one, or type a TOML file with one GPU's figures. `auto` is this machine, once calibrated by "
    "`ridgeplan calibrate`."
)
QUALITY_HELP = (
    "exact keeps the model's output distribution; near-lossless also allows 8-bit weights and KV cache, 4-bit also "
    "4-bit weights, lossy also dropping tokens."
)
HOST_HELP = "Host memory for layers that do not fit the GPU. With `auto` the default is 90% of this machine's."
GPU_COUNTS = ("1", "2", "4", "8", "16")
GPUS_HELP = "GPUs that the model may be divided among. vLLM executes plans for several."
SIZES = ("memory_limit", "host_memory")  # inputs in bytes
CONTEXT_STEPS = tuple(sorted(step << power for power in range(10, 21) for step in (2, 3) if step << power <= 1 << 20))
BATCH_STEPS = tuple(1 << power for power in range(9))
NEW_TOKEN_STEPS = tuple(1 << power for power in range(6, 15))


@dataclass(frozen=True)
class PageQuestion:
    """The sidebar's inputs, parsed; the planner validates them. Its defaults are the command line's."""

    model: str
    gpu: str
    context: int
    options: SearchOptions = field(default_factory=SearchOptions)

    def answer(self) -> Recommendation:
        """The recommendation. Raises a ValueError that says what to change."""
        return planner.recommend(self.model, self.gpu, self.context, self.options)

    def to_question(self, parallel: Parallel | None = None) -> Question:
        """The planner's form of it, for the weights as the runtime holds them; by default at the best degrees."""
        question = ask(self.model, self.gpu, self.context, self.options)
        divided = choose_degrees(question, best_plan)[0] if parallel is None else question.on_gpus(parallel)
        return divided.as_executed

    def command(self, verb: str = "plan") -> str:
        """The command that asks the same in a terminal."""
        usual = vars(SearchOptions())
        words = ["ridgeplan", verb, self.model, "--gpu", self.gpu, "--ctx", str(self.context)]
        for name, value in vars(self.options).items():
            if value != usual[name]:
                flag = f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [flag, _option_text(name, value)]
        return shlex.join(words)


def _option_text(name: str, value: Any) -> str:
    if name in SIZES:
        return f"{value / 1e9:g}GB"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class PageInputs:
    """The sidebar's inputs as they were typed. options: those of SearchOptions that are no text."""

    model: str
    gpu: str
    texts: dict[str, str]
    options: dict[str, Any]

    def question(self) -> PageQuestion:
        """The inputs, parsed. Raises a ValueError that names everything that is wrong with them."""
        model, gpu, values, problems = self.model.strip(), self.gpu.strip(), dict[str, Any](), []
        for name, parse in PARSED.items():
            try:
                values[name] = parse(self.texts[name])
            except PlanError as error:
                problems.append(f"{name.replace('_', ' ')}: {error}")
        context = values.pop("context", 1)
        options, *_ = together(
            [lambda: SearchOptions(**values, **self.options), lambda: resolve(model, gpu),
             lambda: Workload("any", "any", context)], problems
        )  # fmt: skip
        return PageQuestion(model, gpu, context, options)


def ask_question() -> PageInputs:
    """The inputs as widgets."""
    models = [shape.name for shape in list_models()]
    gpus = [*(item.name for item in list_hardware()), THIS_MACHINE]
    model = st.selectbox("Model", models, models.index(DEFAULT_MODEL), key="model", help=MODEL_HELP,
                         accept_new_options=True, bind=IN_URL)  # fmt: skip
    gpu = st.selectbox("GPU", gpus, gpus.index(DEFAULT_GPU), key="gpu", help=GPU_HELP,
                       accept_new_options=True, bind=IN_URL)  # fmt: skip
    context = quantity("Context (tokens)", "context", DEFAULT_CONTEXT, CONTEXT_STEPS, tokens)
    batch = quantity("Batch", "batch", "1", BATCH_STEPS, count)
    new_tokens = quantity("New tokens", "new_tokens", "1k", NEW_TOKEN_STEPS, tokens)
    quality = st.selectbox("Quality", [*map(str, Quality)], 1, key="quality", help=QUALITY_HELP, bind=IN_URL)
    with st.expander("More"):
        objective = st.selectbox("Objective", [*map(str, Objective)], key="objective", bind=IN_URL)
        backend = st.selectbox("Backend", [*map(str, Backend)], [*Backend].index(Backend.RIDGEPLAN), key="backend",
                               help="Engine that will run the plan.", bind=IN_URL)  # fmt: skip
        gpus = st.selectbox("GPUs", GPU_COUNTS, key="num_gpus", help=GPUS_HELP, bind=IN_URL)
        share = st.slider("Memory utilization", 0.1, 1.0, MEMORY_UTILIZATION, 0.05,
                          key="memory_utilization", bind=IN_URL)  # fmt: skip
        limit = st.text_input(
            "Memory limit", key="memory_limit", bind=IN_URL, placeholder="none, or a size such as 24GB"
        )
        of_host = st.text_input("Host memory", key="host_memory", bind=IN_URL, help=HOST_HELP,
                                placeholder=size_text(HOST_MEMORY_BYTES))  # fmt: skip
        yarn = st.toggle("YaRN beyond the model's context limit", key="yarn", bind=IN_URL)
    return PageInputs(
        model or "", gpu or "",
        {"context": context, "batch": batch, "new_tokens": new_tokens, "memory_limit": limit, "host_memory": of_host},
        {
            "quality": quality, "objective": objective, "memory_utilization": share, "yarn": yarn, "backend": backend,
            "gpus": int(gpus) if gpus != GPU_COUNTS[0] else None,
        },
    )  # fmt: skip


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that returns None for an empty text."""
    return lambda text: parse(text) if text.strip() else None


PARSED: dict[str, Callable[[str], Any]] = {
    "context": tokens, "batch": count, "new_tokens": tokens, **dict.fromkeys(SIZES, optional(size_bytes)),
}  # fmt: skip


def quantity(label: str, key: str, default: str, steps: Sequence[int], parse: Callable[[str], int]) -> str:
    """A text such as `128k`, and a slider that stands where the text does and writes the same text."""
    text = st.text_input(label, default, key=key, bind=IN_URL, help="A number such as 120000, 128k or 1M.")
    st.session_state[f"{key}_slider"] = meant = _meant(text, steps, parse)
    st.select_slider(
        label, sorted({*steps, meant}), key=f"{key}_slider", format_func=tokens_text, label_visibility="collapsed",
        on_change=lambda: st.session_state.update({key: tokens_text(st.session_state[f"{key}_slider"])}),
    )  # fmt: skip
    return text


def _meant(text: str, steps: Sequence[int], parse: Callable[[str], int]) -> int:
    """What the text means, of which the slider has a step; its first step where the text means nothing."""
    try:
        return min(max(parse(text), 1), MAX_BATCH * steps[-1])
    except PlanError:
        return steps[0]


def change(changes: dict[str, Any]) -> None:
    """Sets inputs, by the names of `recommend`'s arguments, as if they had been typed. For callbacks of buttons."""
    for name, value in changes.items():
        name = "num_gpus" if name == "gpus" else name
        st.session_state[name] = "" if value is None else value if isinstance(value, (bool, float)) else str(value)


FIELDS = {"yarn": "YaRN", "gpus": "GPUs", "backend": "Backend"}  # names of the planner's arguments in its texts


def escaped(text: str) -> str:
    """`text` for Markdown to show as it is, with the page's names of arguments: names could hold links or formulas."""
    return re.sub(r"([\\`*_\[\]<>$~:#|])", r"\\\1", with_names(text, lambda name: FIELDS.get(name, name)))
