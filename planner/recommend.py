"""The best plan for a question: candidates are searched, filtered and ranked, and the choice is explained.

A faster plan must be faster beyond the noise of the predictions: in 84% of the sampled errors, which is one standard
deviation (the one-standard-error rule of Breiman et al. 1984), or by more than 3%. One of a looser quality must be
faster by more than 3%.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.planner.feasibility import infeasible, on_device, search_regrouped
from ridgeplan.planner.lowering import used_classes
from ridgeplan.planner.parallelism import choose_degrees
from ridgeplan.planner.prediction import Prediction, predict_question, sampled_tpot_ms, sampled_ttft_ms
from ridgeplan.planner.quality import (
    Quality,
    QualityFloor,
    losses,
    published_loss,
    quality_of,
    saved_rows,
    stated_losses,
)
from ridgeplan.planner.queries.drafter_range import drafter_range
from ridgeplan.planner.question import Objective, Question, SearchOptions, ask, expert_notes
from ridgeplan.planner.recommendation import Alternative, Recommendation
from ridgeplan.planner.render.text import on_host_text, prompt_notes
from ridgeplan.planner.search import Candidate, search
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.execution import next_gamma
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.presets import PRESETS, autoregressive
from ridgeplan.roofline.plan.support import is_converted, missing_architecture

CONFIDENCE = 0.84  # that the faster plan is faster
TOLERANCE = 0.03  # how much slower, by the best estimates, the preferred plan may be
MIN_OFFLOADED_SPEEDUP = 0.7  # over plain decoding, of plans with layers on the host where others fit without
MAX_UNNAMED = 8  # listed plans that are no presets
MAX_TELLING_SPREAD = 0.9  # of calibrated times; beyond it, which plan is faster is a guess


def recommend(
    model: str | ModelShape, gpu: str, ctx: int | str, options: SearchOptions | None = None, **changes: Any
) -> Recommendation:
    """Finds the fastest plan that fits and runs for a model on a machine at a context, and predicts it.

    The answer also has every alternative with the reason it lost, and a faster plan that nothing runs yet, if any.

    `model` is a name of the catalog, a config.json, a GGUF file, a hub id in the local cache, or a ModelShape. `gpu` is
    a name of the catalog, a TOML file, or "auto" for this machine. `ctx` is the tokens of a prompt, also as "128k".
    The keywords are the fields of `SearchOptions`, which may be given instead, or beside it to change some:
    `recommend("Llama-3.1-8B", "h200", "128k", batch=4, quality="exact", memory_limit="24GB")`.

    With `gpus=8` the model may be divided among up to 8 GPUs, and the degrees of parallelism are chosen, too; vLLM
    executes such plans.

    Raises PlanError, UnknownModel, UnknownHardware or ProfileError (all ValueError) for bad input, and NothingFits.
    """
    whole_model = ask(model, gpu, ctx, options, **changes)
    as_stored, degrees = choose_degrees(whole_model, best_plan)
    question = as_stored.as_executed

    candidates = ranked(penalize_unmeasured_rates(search(question), question))
    executable = _executable(candidates, question)
    if not executable:
        raise infeasible(question, whole_model)
    fits_device = any(not candidate.host_bytes for candidate in executable)
    if fits_device:
        executable = _worth_offloading(executable, candidates)

    finalists, hardware = contenders(executable, question), question.profile.hardware
    listed = _listed(candidates, [*executable[:MAX_UNNAMED], *finalists])
    baseline, predictions = _predicted(listed, question)
    winner = choose(finalists, sampled_scores([predictions[candidate] for candidate in finalists], question))
    noise = noise_note(predictions[winner], baseline, question)
    caveats = _notes(winner.plan, predictions[winner], fits_device, question, as_stored)

    return Recommendation(
        shape=question.shape,
        plan=winner.plan,
        name=winner.name,
        predicted=_with_speedup(predictions[winner], baseline, None if noise else question),
        baseline=baseline,
        best_estimated=_best_estimated(as_stored, candidates, executable[0], predictions, baseline),
        alternatives=tuple(_alternatives(listed, winner, predictions, baseline, question)),
        losses=tuple(stated_losses(winner.plan, saved_rows(), question.options.backend)),
        notes=(*([noise] if noise else []), *caveats),
        memory_limit_bytes=question.memory_limit_bytes,
        host_limit_bytes=question.host_limit_bytes,
        fits_device=fits_device,
        on_device=() if fits_device else on_device(question, whole_model),
        model_runs=question.engine is not None
        or (missing_architecture(as_stored.shape, hardware) is None and hardware.has_kernels),
        backend=question.options.backend,
        drafter_range=drafter_range(winner.plan, question.shape, question.profile, question.machine),
        adaptive=_adaptive(winner.plan, question),
        degrees=degrees,
    )


def best_plan(question: Question) -> Candidate:
    """The plan of a question that `recommend` chooses, or the smallest where none fits the device."""
    candidates = ranked(penalize_unmeasured_rates(search(question), question))
    fitting = [candidate for candidate in candidates if candidate.rejection(question) is None]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.peak_bytes)
    return chosen_of_each([contenders(fitting, question)], question)[0]


# Candidates: which may be recommended, from the best to the worst.


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """From the best score to the worst; of equal scores the preferred plan first."""
    by_score: dict[float, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.score):
        by_score.setdefault(candidate.score, []).append(candidate)
    ties = (sorted(tie, key=lambda candidate: preference(candidate.plan)) if tie[1:] else tie
            for tie in by_score.values())  # fmt: skip
    return [candidate for tie in ties for candidate in tie]


def penalize_unmeasured_rates(candidates: Iterable[Candidate], question: Question) -> list[Candidate]:
    """Moves the score of each plan whose rates are a prior to the slow end of their band.

    So no plan wins by what nobody measured. An acceptance that is a prior is already at its low end
    (`AcceptanceModel.competing`).
    """
    return [
        replace(candidate, score=candidate.score * (1 + unmeasured_spread(candidate.plan, question)))
        for candidate in candidates
    ]


def unmeasured_spread(plan: Plan, question: Question) -> float:
    """The largest relative spread of the kernel classes that a plan uses and whose rates are a prior; 0 if none is.

    Of an engine's plan, that of its step. 0 where memory is minimized, which does not depend on rates.
    """
    if question.options.objective is Objective.MEMORY:
        return 0.0
    if question.engine is not None:
        source, spread = question.engine.plan_certainty(plan, question.shape)
        return spread if source == "prior" else 0.0
    rates = (question.profile.rates(kind) for kind in used_classes(plan, question.shape))
    return max((each.spread for each in rates if each.source == "prior"), default=0.0)


def _executable(candidates: Sequence[Candidate], question: Question) -> list[Candidate]:
    """The candidates that run and fit.

    If the best of them needs the host's memory or none fits, other quantization groups are tried too, with which plans
    may fit the device alone.
    """
    fitting = [candidate for candidate in candidates if candidate.rejection(question) is None]
    if fitting and not fitting[0].host_bytes:
        return fitting
    on_device_only = search_regrouped(question.with_options(offload=False))
    regrouped = on_device_only if fitting or on_device_only else search_regrouped(question)
    best: dict[object, Candidate] = {}  # of plans that differ in group sizes alone, which share a name
    for candidate in ranked([*fitting, *penalize_unmeasured_rates(regrouped, question)]):
        best.setdefault((candidate.name, candidate.host_bytes > 0), candidate)
    return list(best.values())


def _worth_offloading(executable: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without the plans that need the host's memory and are much slower than plain decoding would be."""
    plain_s = next(candidate.tpot_s for candidate in candidates if candidate.name == "autoregressive")
    return [each for each in executable if worth_offloading(each.host_bytes, each.tpot_s, plain_s)]


def worth_offloading(host_bytes: Term, tpot_s: Term, plain_tpot_s: Term) -> Any:
    """Whether a plan stays on the device, or is about as fast as plain decoding would be; numbers or arrays."""
    return (host_bytes == 0) | (plain_tpot_s >= MIN_OFFLOADED_SPEEDUP * tpot_s)


def _listed(candidates: Sequence[Candidate], executable: Sequence[Candidate]) -> list[Candidate]:
    """The best of those that run and fit, the best few plans that are no presets, and all presets.

    Of plans with a file's own weights the best, too: they give up nothing, though rates that were not measured hold
    them back.
    """
    unnamed = [candidate for candidate in candidates if candidate.name not in PRESETS][:MAX_UNNAMED]
    unnamed += [candidate for candidate in candidates if candidate.plan.weights.stored][:1]
    presets = [candidate for candidate in candidates if candidate.name in PRESETS]
    named: dict[object, Candidate] = {}  # once, as those that run may have other group sizes than the usual ones
    for candidate in (*executable, *unnamed, *presets):
        named.setdefault((candidate.name, candidate.host_bytes > 0), candidate)
    return list(named.values())


# The choice among candidates that are equally fast within the noise.


def contenders(executable: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Those of the ranked candidates that `choose` decides between, from the fastest to the preferred.

    Only the last one where its quality is stricter than that of all others.
    """
    near = [candidate for candidate in executable if candidate.score <= executable[0].score * _tolerated(question)]
    ranks = preference_ranks([candidate.plan for candidate in near])
    kept = undominated(np.array([candidate.score for candidate in near]), ranks, question)
    finalists = [candidate for candidate, keep in zip(near, kept, strict=True) if keep]
    *others, last = (_strictness(candidate.plan) for candidate in finalists)
    return finalists[-1:] if last < min(others, default=0) else finalists


def undominated(scores: np.ndarray, ranks: np.ndarray, question: Question) -> np.ndarray:
    """Mask of the plans within the tolerance of the best that are preferred to all faster ones: [..., plans].

    scores: infinite for plans that are out, [..., plans]; ranks: by preference, [plans].
    """
    order = np.lexsort((np.broadcast_to(ranks, scores.shape), scores), axis=-1)
    by_score = ranks[order]
    least = np.minimum.accumulate(by_score, axis=-1)
    kept = np.empty(scores.shape, dtype=bool)
    np.put_along_axis(kept, order[..., :1], True, axis=-1)
    np.put_along_axis(kept, order[..., 1:], by_score[..., 1:] < least[..., :-1], axis=-1)
    return kept & np.isfinite(scores) & (scores <= scores.min(axis=-1, keepdims=True) * _tolerated(question))


def _tolerated(question: Question) -> float:
    """The largest score of a contender, relative to the best; memory has no noise."""
    return 1 if question.options.objective is Objective.MEMORY else 1 + TOLERANCE


def preference_ranks(plans: Sequence[Plan]) -> np.ndarray:
    """Places of the plans by preference, of equal ones the same: [plans]."""
    keys = [preference(plan) for plan in plans]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([places[key] for key in keys])


def chosen_of_each(finalists: Sequence[Sequence[Candidate]], question: Question) -> list[Candidate]:
    """The choice among the contenders of each of several workloads, which are predicted in one evaluation."""
    contested = [candidate.plan for each in finalists if len(each) > 1 for candidate in each]
    scores = iter(sampled_scores(predict_question(contested, question), question) if contested else ())
    return [choose(each, np.stack(list(islice(scores, len(each))))) if len(each) > 1 else each[0] for each in finalists]


def sampled_scores(predictions: Sequence[Prediction], question: Question) -> np.ndarray:
    """What the question minimizes, [plans, samples], in milliseconds or bytes."""
    if question.options.objective is Objective.MEMORY:
        return np.array([[predicted.best.peak_memory_bytes] for predicted in predictions])
    tpot_ms = sampled_tpot_ms(predictions, question.profile, question.engine)
    if question.options.objective is Objective.LATENCY:
        return tpot_ms
    return sampled_ttft_ms(predictions, question.profile) + question.workload.new_tokens * tpot_ms


def choose(candidates: Sequence[Candidate], scores: np.ndarray) -> Candidate:
    """The most exact and then the simplest of the contenders that the first, the fastest, does not surely beat.

    A contender of a stricter quality need not be unbeaten. scores: sampled, [plans, samples].
    """
    probability = (scores[0] < scores).mean(axis=1)
    chosen = candidates[0]
    for candidate, beaten in zip(candidates, probability, strict=True):  # from the fastest, to the preferred
        if beaten < CONFIDENCE or _strictness(candidate.plan) < _strictness(chosen.plan):
            chosen = candidate
    return chosen


def _strictness(plan: Plan) -> int:
    return list(Quality).index(quality_of(plan))


def preference(plan: Plan) -> tuple[float, ...]:
    """A sort key: plans that keep all layers on the GPU first, then exact ones, then simple ones.

    Exactness: the quality, then how many losses there are, the published loss of an eviction, and whether prompts go
    through in chunks. Simplicity: no speculation, drafts that read every token, and few formats
    beside bf16 (of the target's weights, of the drafts' own weights, and of the KV cache).
    """
    formats = (not plan.weights.dense) + plan.weights.draft_copy + plan.kv.format.quantized
    lost = len(losses(plan)), published_loss(plan), int(plan.eviction.chunk > 0)
    exactness = _strictness(plan), *lost
    simplicity = (
        int(plan.speculation.active) + int(plan.speculation.drafter.cascades) + int(plan.speculation.adaptive),
        int(plan.speculation.sparse),
        formats,
    )
    return int(plan.placement.offload), *exactness, *simplicity


def why_preferred(plan: Plan, other: Plan) -> str:
    """How `plan`, which is preferred, differs from `other`: in placement, in exactness or in simplicity."""
    if plan.placement.offload != other.placement.offload:
        return "all on the GPU"
    exactness = slice(1, 5)
    return "more exact" if preference(plan)[exactness] < preference(other)[exactness] else "simpler"


# The answer: predictions, what else there is, and why it was not chosen.


def _predicted(listed: Sequence[Candidate], question: Question) -> tuple[Prediction, dict[Candidate, Prediction]]:
    """Plain decoding's prediction, and those of the candidates."""
    plans = [autoregressive(question.workload), *(candidate.plan for candidate in listed)]
    baseline, *predictions = predict_question(plans, question)
    return baseline, dict(zip(listed, predictions, strict=True))


def _with_speedup(predicted: Prediction, baseline: Prediction, question: Question | None) -> Prediction:
    """With the speed-up over plain decoding and, given the question, its probability unless all drafts may fail."""
    compared = predicted.against(baseline)
    if question is None:
        return compared
    tpot_ms, plain_ms = sampled_tpot_ms([predicted, baseline], question.profile, question.engine)
    return replace(compared, beats_plain=float((tpot_ms < plain_ms).mean()) if predicted.acceptance.low else None)


def noise_note(predicted: Prediction, baseline: Prediction, question: Question) -> str | None:
    """That the machine was too busy during its calibration to tell whether a plan is faster; None where it was not."""
    spread = max(predicted.kernel_spread, baseline.kernel_spread)
    if question.engine is not None or spread <= MAX_TELLING_SPREAD:
        return None
    return (
        f"this machine was too busy to tell which plan is faster: its calibration of {question.profile.date} knows "
        f"times within {spread:.0%} only; run `ridgeplan calibrate --quick` once other programs have ended"
    )


def _best_estimated(
    as_stored: Question,
    candidates: Sequence[Candidate],
    fastest: Candidate,
    predictions: Mapping[Candidate, Prediction],
    baseline: Prediction,
) -> Alternative | None:
    """The best plan of all on whatever backend; None if `fastest`, which runs, is as good.

    Weights that the runtime converts could also stay as the checkpoint has them, which is searched separately where no
    plan of this runtime keeps them.
    """
    searches, shape = [(as_stored.as_executed, candidates)], as_stored.shape
    if as_stored.engine is None and is_converted(shape) and not shape.weight_bits.stored.layers:
        searches.append((as_stored, penalize_unmeasured_rates(search(as_stored), as_stored)))
    better = [
        (candidate, question)
        for question, searched in searches
        for candidate in searched
        if candidate.score < fastest.score
        and candidate.exclusion(question) is None
        and question.unsupported(candidate.plan)
    ]
    if not better:
        return None
    best, question = min(better, key=lambda pair: pair[0].score)
    # A plan of the checkpoint's own weights is not among the alternatives.
    predicted = predictions.get(best) or predict_question([best.plan], question)[0]
    predicted = _with_speedup(predicted, baseline, question)
    return Alternative(best.name, best.plan, predicted, best.rejection(question) or "")


def _alternatives(
    listed: Sequence[Candidate],
    winner: Candidate,
    predictions: Mapping[Candidate, Prediction],
    baseline: Prediction,
    question: Question,
) -> list[Alternative]:
    """First the plans that only lost, then those that are ruled out; each from the best to the worst."""
    losers = ranked(candidate for candidate in listed if candidate is not winner)
    rejections = {candidate.plan: candidate.rejection(question) for candidate in losers}
    losers.sort(key=lambda loser: rejections[loser.plan] is not None)
    return [
        Alternative(
            loser.name,
            loser.plan,
            predicted := predictions[loser].against(baseline),
            rejections[loser.plan] or _why_it_lost(loser, winner, predicted, question),
        )
        for loser in losers
    ]


def _why_it_lost(loser: Candidate, winner: Candidate, predicted: Prediction, question: Question) -> str:
    ratio, memory = loser.score / winner.score, question.options.objective is Objective.MEMORY
    factor = "within 1% of" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}x"
    times = f"{factor} the recommended plan's {'memory' if memory else 'time'}"
    preferred = preference(winner.plan) < preference(loser.plan)
    if ratio < 1 and loser.host_bytes and not winner.host_bytes and predicted.speedup < MIN_OFFLOADED_SPEEDUP:
        return f"offloaded, and below {MIN_OFFLOADED_SPEEDUP}x plain decoding: {times}"
    if ratio < 1 and not preferred:
        return f"measurably slower than the fastest plan: {times}"
    if ratio <= 1 and preferred:
        return f"within the noise: {times}, and the recommended plan is {why_preferred(winner.plan, loser.plan)}"
    slower = "equal" if ratio == 1 else "larger" if memory else "slower"
    if unmeasured_spread(loser.plan, question) > unmeasured_spread(winner.plan, question):
        slower = "not measured, and slower at the slow end of its band"
    return f"{slower}: {times}"


def _notes(
    plan: Plan, predicted: Prediction, fits_device: bool, question: Question, as_stored: Question
) -> Iterator[str]:
    """Caveats of the recommended plan, of its engine, and of the question."""
    first = tuple(question.first_notes())
    yield from first
    if fits_device and predicted.offloaded_layers:
        yield f"{on_host_text(predicted, question.host_limit_bytes)}; plans without offloading are slower"
    if question.engine is not None:
        yield from question.engine.notes()
        yield question.engine.formats_text(plan)
    else:
        yield from prompt_notes(predicted, question.workload.batch)
        yield from expert_notes(plan, question)
    if isinstance(question.options.quality, QualityFloor):
        yield question.options.quality.verdict(plan, question.options.backend)
    stated = (*first, *(question.engine.notes() if question.engine else ()))
    yield from (note for note in as_stored.notes() if note not in stated)
    yield from as_stored.limit_notes()


def _adaptive(plan: Plan, question: Question) -> Plan | None:
    """The plan with an adaptive gamma: up to the next larger one if that fits into memory, else up to its own.

    None for engines, which lack it.
    """
    if not plan.speculation.active or question.engine or question.options.objective is Objective.MEMORY:
        return None
    largest = plan.speculation.gamma
    for gamma in (largest,) if plan.speculation.drafter.active else (next_gamma(largest), largest):
        adaptive = replace(plan, speculation=replace(plan.speculation, gamma=gamma, adaptive=True))
        if peak_bytes(adaptive, question.shape, question.machine) <= question.memory_limit_bytes:
            return adaptive
    return None
