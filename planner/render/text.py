"""Answers in words: overheads, bottleneck, and glossary."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ridgeplan.planner.prediction import Figures, OpTime, Prediction
from ridgeplan.planner.quality import losses
from ridgeplan.planner.quantities import size_text, time_text
from ridgeplan.planner.search import named_plan
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.execution import RoundKind, round_shape
from ridgeplan.roofline.passes import SOFTMAX_IN_TORCH, STATES_IN_TORCH, WINDOWED_ATTENTION, category
from ridgeplan.roofline.plan.plan import DraftCodes, Plan, PlanError, TextKind, Workload
from ridgeplan.roofline.plan.policy import AllTokens, TokenEviction, TokenSelection
from ridgeplan.roofline.plan.presets import PRESETS, describe

LAUNCH_BOUND = 1.25  # a prompt takes so many times what its kernels take where the host's launches bind it
# What of prompts was not timed, by the operation that has it.
UNTIMED = {
    STATES_IN_TORCH: "recurrent states (in torch)",
    SOFTMAX_IN_TORCH: "attention with sinks or soft caps (in torch)",
    "latent products (keys)": "attention over expanded latents",
}
MIN_SHARE = 0.005  # of a target step; smaller overheads are not mentioned


def prompt_notes(predicted: Prediction, batch: int) -> Iterator[str]:
    """That the time of prompts is a guess where it was not measured, and that a batch's short ones run one by one."""
    untimed = [UNTIMED[op.op] for op in predicted.breakdown if op.part == "prefill" and op.op in UNTIMED]
    if untimed:
        named = ", ".join(dict.fromkeys(untimed))
        yield f"the time to the first token is a guess: what prompts take in {named} was not timed"
    device_ms = sum(1e3 * op.seconds for op in predicted.breakdown if op.part == "prefill")
    request_ms = predicted.best.ttft_request_ms
    if batch > 1 and request_ms >= LAUNCH_BOUND * device_ms:
        yield (
            f"prompts run one by one: launching the kernels of one takes {time_text(request_ms)}, running them "
            f"{time_text(device_ms)}; engines that batch short prompts, such as vLLM, answer the last one sooner"
        )


def on_host_text(predicted: Prediction, limit_bytes: float | None = None) -> str:
    """The number of layers on the host, at the end where layers leave as the text grows, and their memory there."""
    layers = "1 layer" if predicted.offloaded_layers == 1 else f"{predicted.offloaded_layers} layers"
    limit = f" of {size_text(limit_bytes)} there" if limit_bytes is not None else " there"
    when = " in the end" if predicted.breakdown_source.plan.placement.adaptive else ""
    return f"KV of {layers} is on the host{when}, {size_text(predicted.host_bytes)}{limit}"


def first_token_text(figures: Figures, batch: int) -> str:
    """The time to the first token of a request and, in a batch, to that of the last request."""
    last = f" (batch's last {time_text(figures.ttft_ms)})" if batch > 1 else ""
    return f"{time_text(figures.ttft_request_ms)}{last}"


def overhead_text(plan: Plan, predicted: Prediction) -> str | None:
    """The overhead of a target step and its cause; None if it is negligible."""
    if predicted.overhead_ms < MIN_SHARE * predicted.verify_ms:
        return None
    causes = (("choosing and gathering tokens", plan.attention.active), ("layers on the host", predicted.host_bytes))
    named = " and ".join(cause for cause, applies in causes if applies)
    return f"{time_text(predicted.overhead_ms)} for {named or 'gathering tokens'}"


def plain_text(shape: ModelShape) -> str:
    """Plain decoding, over which speed-ups are; in which precision, where loading decodes the checkpoint's weights."""
    return "plain decoding in full precision" if shape.weight_bits.decoded else "plain decoding"


BALANCED_WITHIN = 0.1  # weights and KV cache are balanced if attention takes 40% to 60% of a step


def bottleneck(plain: Prediction, shape: ModelShape, workload: Workload) -> Iterator[str]:
    """Two sentences about the bottleneck of plain decoding."""
    share = attention_share(plain)
    verdict = "the KV cache is the bottleneck" if share > 0.5 else "the weights are the bottleneck"
    if abs(share - 0.5) <= BALANCED_WITHIN:
        verdict = "the weights and the KV cache take about equal time"
    yield f"plain decoding spends {100 * share:.0f}% of a step on attention: {verdict}"
    crossover = crossover_context(plain, shape, workload)
    gain = f"at batch {workload.batch}, quantizing weights helps more than quantizing KV"
    yield (
        f"{gain} at any context" if crossover is None else f"{gain} up to about {_rounded(crossover)} tokens of context"
    )


def attention_share(plain: Prediction) -> float:
    """The share of a step's time that attention takes."""
    ops = _step(plain)
    return sum(op.seconds for op in ops if category(op.kind) == "attention") / sum(op.seconds for op in ops)


def crossover_context(plain: Prediction, shape: ModelShape, workload: Workload) -> float | None:
    """Tokens of context at which a step of plain decoding reads as many bytes of weights as of KV; None if never.

    Below it, quantizing weights saves more bytes; above it, quantizing KV. Matrix products read the same bytes at
    every context. The bytes that attention reads grow with the context, up to the window in sliding-window layers.
    """
    read = {"linear": 0.0, "attention": 0.0, "window": 0.0, "other": 0.0}
    for op in _step(plain):
        read["window" if op.op == WINDOWED_ATTENTION else category(op.kind)] += op.bytes
    tokens = workload.context + workload.new_tokens / 2  # on average, during the generation
    window = shape.window_tokens or tokens
    per_token, per_window_token = read["attention"] / tokens, read["window"] / min(tokens, window)
    inside = read["linear"] / (per_token + per_window_token)
    if shape.window_tokens is None or inside <= window:
        return inside
    return (read["linear"] - per_window_token * window) / per_token if per_token else None


def _step(plain: Prediction) -> list[OpTime]:
    return [op for op in plain.breakdown if op.part == "target"]


def _rounded(tokens: float) -> str:
    """A whole number, rounded to three significant digits."""
    return f"{float(f'{tokens:.3g}'):,.0f}"


def plain_words(plan: Plan) -> str:
    """What a plan changes of plain decoding, for those who do not know its name."""
    weights, speculation = plan.weights, plan.speculation
    clauses = [
        f"weights in {weights.target_bits} bits" if weights.target_bits < 16 else "",
        "weights as the GGUF file stores them" if weights.stored else "",
        "the KV cache in 8 bits" if plan.kv.format.buffered else "",
        "a part of the prompt dropped from the KV cache" if plan.eviction.active else "",
        "the KV cache of some layers in the host's memory" if plan.placement.offload else "",
        "a part of the context read at every step" if plan.attention.active else "",
    ]
    if speculation.self_drafts:
        reading = [
            f"{weights.draft_bits}-bit weights" if weights.draft_differs else "",
            "a 4-bit KV cache" if speculation.codes is DraftCodes.UPPER else "",
            "a part of the context" if speculation.sparse else "",
        ]
        *most, last = filter(None, reading) if any(reading) else ["the whole model"]
        read = f"{', '.join(most)} and {last}" if most else last
        tokens = "1 token" if speculation.gamma == 1 else f"{'up to ' * speculation.adaptive}{speculation.gamma} tokens"
        clauses.append(f"{tokens} drafted at a time from {read}, then checked in one pass")
    elif speculation.active:
        clauses.append("tokens proposed by a drafter, then checked in one pass")
    return "; ".join(filter(None, clauses)) or "plain decoding"


def gamma_text(kind: RoundKind) -> str:
    """Drafts of a round, and of a cascade the passes that draft them and proposals to each: `3 in 2 passes over 1`."""
    gamma, passes, depth = round_shape(kind)
    return f"{gamma} in {passes} pass{'es' * (passes > 1)} over {depth}" if passes and depth else f"{gamma}"


SOURCE_WORDS = {
    "measured": "measured on this model",
    "calibrated": "from kernels that were timed on this kind of GPU or CPU",
    "transferred": "from kernels or acceptance of another machine or model",
    "published": "from a paper's figures",
    "extrapolated": "outside the measured range",
    "prior": "an assumption: nothing comparable was measured",
}


@cache
def terms() -> dict[str, str]:
    """Every term with its meaning: first those of terms.toml, then the sources of figures."""
    with Path(__file__).with_name("terms.toml").open("rb") as file:
        glossary: dict[str, str] = tomllib.load(file)
    return glossary | {word: f"A source of figures: {meaning}." for word, meaning in SOURCE_WORDS.items()}


def explain(word: str) -> str:
    """The meaning of a term, a preset or another plan. Raises PlanError with similar names for an unknown one."""
    term = word.strip().casefold()
    known = {name.casefold(): text for name, text in terms().items()}
    if term in known:
        return f"{explain_plan(term)} {known[term]}" if term in PRESETS else known[term]
    try:
        return explain_plan(term)
    except PlanError:
        near = get_close_matches(term, [*known, *PRESETS], n=3)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise PlanError(f"unknown term {brief(word)}.{hint} Allowed: a .json plan, a preset or {', '.join(terms())}")


def explain_plan(name: str) -> str:
    """How a plan differs from plain decoding, what its policies do, and its quality cost.

    Raises PlanError for an unknown name.
    """
    plan = named_plan(name, Workload("any", "any", 32_768, text=TextKind.CODE))  # of which drafters have rows
    is_preset = name in PRESETS
    sentences = [f"{'A preset' if is_preset else 'A plan'}: {describe(plan)}.", *_policy_texts(plan)]
    if is_preset and plan.speculation.active:
        gamma = plan.speculation.gamma
        sentences.append(f"The preset drafts {gamma} tokens a round; `plan` searches for the best number.")
    cost = "; ".join(losses(plan)) or "none; the output keeps the model's distribution"
    return " ".join([*sentences, f"Quality cost: {cost}."])


def _policy_texts(plan: Plan) -> Iterator[str]:
    """A sentence on the tokens that each policy of a plan selects or keeps: the first of its class's docstring."""
    policies: list[TokenEviction | TokenSelection] = [plan.attention.selection, plan.speculation.selection]
    if plan.eviction.method is not None:
        policies.insert(0, plan.eviction.method)
    for policy in policies:
        if policy == AllTokens():
            continue
        first_paragraph, *_ = (type(policy).__doc__ or "").split("\n\n")
        yield f"{policy.name}: {' '.join(first_paragraph.split())}"
