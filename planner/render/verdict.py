"""A recommendation in plain words: the verdict, the plan, and a table of reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ridgeplan.planner.engines.formats import ENGINES
from ridgeplan.planner.prediction import Prediction
from ridgeplan.planner.quantities import probability_text, size_text, time_text
from ridgeplan.planner.render.text import SOURCE_WORDS, bottleneck, plain_text, plain_words
from ridgeplan.roofline.execution import RUNNING_LOSS, STARTING_LOSS, round_shape
from ridgeplan.roofline.plan.support import Backend

if TYPE_CHECKING:
    from ridgeplan.planner.recommendation import Recommendation


def verdict(recommendation: Recommendation) -> str:
    """One sentence in plain words: which model on which GPU, how fast, and in how much memory.

    A warning comes first where the plan does not fit the GPU alone or is slow.
    """
    workload, predicted = recommendation.plan.workload, recommendation.predicted
    warning = f"{recommendation.warning}. " if recommendation.warning else ""
    gain = f", {predicted.speedup:.2f}x as fast as {recommendation.baseline_text}" if predicted.beats_plain else ""
    return (
        f"{warning}{workload.model.rpartition('/')[2]} on {workload.devices}: {time_text(predicted.best.tpot_ms)} per "
        f"token{gain}, in {_memory_text(recommendation)}."
    )


def headline(recommendation: Recommendation) -> str:
    """What kind of answer the plan is."""
    if recommendation.warning or recommendation.given:
        return recommendation.verdict
    if recommendation.backend is not Backend.RIDGEPLAN:
        engine = ENGINES.get(recommendation.backend)
        plugin = recommendation.backend is Backend.VLLM_PLUGIN
        return f"for {engine.title if engine else 'vLLM with the plugin' if plugin else 'any engine'}"
    return "recommended" if recommendation.model_runs else "best plan that ridgeplan cannot execute yet"


def sentence(text: str) -> str:
    """The text with a capital letter."""
    return text[:1].upper() + text[1:]


def plan_sentence(recommendation: Recommendation) -> str:
    """The plan's name and what it does, in plain words, and how sure it is that it is faster."""
    predicted, name = recommendation.predicted, recommendation.name
    kind = sentence(headline(recommendation))
    if predicted.beats_plain is None:  # a note says why
        return f"{kind}: {plain_words(recommendation.plan)} ({name})."
    if not predicted.beats_plain:
        return f"{kind}: plain decoding ({name}). No plan that runs is reliably faster."
    chance = f"Faster than plain decoding with {probability_text(predicted.beats_plain)} probability."
    return f"{kind}: {plain_words(recommendation.plan)} ({name}). {chance}"


def reasons(recommendation: Recommendation) -> Iterator[tuple[str, str]]:
    """What is explained, and the explanation: the change, its gain, the bottleneck, the drafts, memory and quality."""
    plan, predicted, other = recommendation.plan, recommendation.predicted, recommendation.best_estimated
    faster = other and f"{other.preset}: {_time_text(other.predicted, recommendation)}, {other.rejected}"
    yield headline(recommendation), f"{recommendation.name}: {plain_words(plan)}"
    yield "time per token", _time_text(predicted, recommendation)
    yield "fastest estimated", faster or "no plan that is only estimated is faster"
    yield "bottleneck", "; ".join(bottleneck(recommendation.baseline, recommendation.shape, plan.workload))
    yield from (
        _drafting(recommendation) if plan.speculation.active else [("no speculation", "a step decodes one token")]
    )
    yield "peak memory", f"{_memory_text(recommendation)} that plans may use"
    yield "quality cost", "; ".join(recommendation.losses) or "none; the output keeps the model's distribution"
    yield "source of the figures", f"{predicted.source}, {SOURCE_WORDS[predicted.source]}"


def _drafting(recommendation: Recommendation) -> Iterator[tuple[str, str]]:
    """The arithmetic of a round, how often drafts are kept, where the drafter pays, and what adapts."""
    predicted, rate = recommendation.predicted, recommendation.predicted.acceptance
    gamma, passes, depth = round_shape(predicted.drafting.kind)
    drafts = "1 token is" if gamma == 1 else f"{gamma} tokens are"
    how = f" in {passes} passes over {depth} proposals" if passes and depth else ""
    each = f"{how}, {time_text(predicted.draft_step_ms)} each" if passes else ""
    if not recommendation.plan.speculation.adapts_to_text:  # whose rounds differ
        yield (
            "drafting",
            f"{drafts} drafted{each}, and checked in one pass of {time_text(predicted.verify_ms)}; "
            f"a round yields {predicted.tokens_per_round:.2f} tokens on average",
        )
    kept = f"{rate.best:.1%} ({rate.low:.1%} to {rate.high:.1%}) of the drafts are kept where those before them were"
    yield "acceptance", f"{kept}; {rate.source}: {rate.where}"
    if recommendation.drafter_range:
        yield "drafter", recommendation.drafter_text
    if recommendation.adaptive:
        loss = f"at most {100 * (RUNNING_LOSS + STARTING_LOSS):.3g}% slower than plain decoding on any text"
        yield "adaptive", f"0 to {recommendation.adaptive.speculation.gamma} drafts, by what is accepted; {loss}"


def _time_text(predicted: Prediction, recommendation: Recommendation) -> str:
    """The time with its band, and the speed-up over plain decoding."""
    sure = predicted.beats_plain
    chance = f", faster with {probability_text(sure)} probability" if sure else ""
    oom_reason = "" if recommendation.baseline_fits else ", which does not fit"
    return (
        f"{time_text(predicted.best.tpot_ms)} ({time_text(predicted.low.tpot_ms)} to "
        f"{time_text(predicted.high.tpot_ms)}), {predicted.speedup:.2f}x {plain_text(recommendation.shape)} "
        f"({time_text(recommendation.baseline.best.tpot_ms)}{oom_reason}){chance} [{predicted.source}]"
    )


def _memory_text(recommendation: Recommendation) -> str:
    peak = recommendation.predicted.best.peak_memory_bytes
    return f"{size_text(peak)} of {size_text(recommendation.memory_limit_bytes)}"
