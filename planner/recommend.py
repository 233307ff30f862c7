"""The best plan for a question: candidates are searched, filtered, ranked, and the choice is explained.

A faster plan must be faster beyond the noise of the predictions: in 84% of the sampled errors, which is one standard
deviation (the one-standard-error rule of Breiman et al. 1984), or by more than 3%.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from ridgeplan.planner.capacity import MEMORY_UTILIZATION, peak_bytes
from ridgeplan.planner.feasibility import NothingFits, on_device, tightest, why_nothing_fits
from ridgeplan.planner.prediction import Prediction, predict_all, sampled_tpot_ms, sampled_ttft_ms
from ridgeplan.planner.quality import Quality, losses, published_loss, quality_of, saved_rows, stated_losses
from ridgeplan.planner.question import Objective, Question, ask, notes
from ridgeplan.planner.recommendation import Alternative, Recommendation
from ridgeplan.planner.render.text import on_host_text
from ridgeplan.planner.search import Candidate, best_of_preset, search
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import next_gamma
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.policies.selections import autoregressive
from ridgeplan.roofline.plan.presets import PRESETS
from ridgeplan.roofline.plan.support import ENGINE_FORMATS, is_converted, missing_architecture

CONFIDENCE = 0.84  # that the faster plan is faster
TOLERANCE = 0.03  # how much slower, by the best estimates, the preferred plan may be


def contenders(possible: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Those of the plans in order of their score that are within the tolerance of the best; memory has no noise."""
    tolerance = 0 if question.objective is Objective.MEMORY else TOLERANCE
    return [one for one in possible if one.score <= possible[0].score * (1 + tolerance)]


def chosen(plans: Sequence[Candidate], scores: np.ndarray) -> Candidate:
    """The most exact and then the simplest of the contenders that the first, the fastest, does not surely beat.

    scores: sampled, [plans, samples].
    """
    beaten = (scores[0] < scores).mean(axis=1)
    level = [one for one, sure in zip(plans, beaten, strict=True) if sure < CONFIDENCE]
    return min(level, key=lambda one: preference(one.plan))


def sampled_scores(predictions: Sequence[Prediction], question: Question) -> np.ndarray:
    """What the question minimizes, [plans, samples], in milliseconds or bytes."""
    if question.objective is Objective.MEMORY:
        return np.array([[one.best.peak_memory_bytes] for one in predictions])
    tpot_ms = sampled_tpot_ms(predictions, question.profile)
    if question.objective is Objective.LATENCY:
        return tpot_ms
    return sampled_ttft_ms(predictions, question.profile) + question.workload.new_tokens * tpot_ms


def preference(plan: Plan) -> tuple[float, ...]:
    """Plans in order of preference: exact before lossy, evictions that lose less by published figures before others,
    of whole prompts before those in chunks, then no layers on the host before some, no speculation before speculation,
    drafts that read every token before those that choose some, and few formats.

    Formats are those beside bf16: of the target's weights, of the drafts' own, and of the KV cache.
    """
    formats = (plan.weights.target_bits != 16) + plan.weights.draft_copy + plan.kv.format.quantized
    lost = len(losses(plan)), published_loss(plan), int(plan.eviction.chunk > 0)
    exactness = list(Quality).index(quality_of(plan)), *lost
    return *exactness, int(plan.placement.offload), int(plan.speculation.active), int(plan.speculation.sparse), formats


def why_preferred(one: Plan, other: Plan) -> str:
    """How `one`, which is preferred, differs from `other`: in exactness or in simplicity."""
    exactness = slice(0, 4)
    return "more exact" if preference(one)[exactness] < preference(other)[exactness] else "simpler"


MAX_UNNAMED = 8


def recommend(
    model: str | ModelShape,
    gpu: str,
    ctx: int | str,
    *,
    batch: int = 1,
    new_tokens: int = 1024,
    quality: str = "near-lossless",
    objective: str = "latency",
    memory_limit: float | str | None = None,
    memory_utilization: float = MEMORY_UTILIZATION,
    profile: Profile | str | None = None,
    acceptance: str | None = None,
    yarn: bool = False,
    backend: str = "ridgeplan",
    kv_format: str | None = None,
    offload: bool = True,
    host_memory: float | str | None = None,
) -> Recommendation:
    """The best plan that runs for a model on a machine at a context and batch, and the best of all, with predictions.

    `model` is a catalog name, a config.json, a GGUF, a hub id in the local cache, or a ModelShape; `gpu` a catalog
    name, a TOML file or "auto". `quality` limits what the target may give up (exact, near-lossless, lossy). Plans may
    take `memory_utilization` of the machine's memory, or `memory_limit` bytes where that is less. `profile` is a
    calibration or its file, `acceptance` a file of `ridgeplan acceptance`. A context beyond the model's is stretched
    if `yarn`. `backend` is what is to execute the plan ("vllm", "sglang", or "any"), by default this package, and
    `kv_format` the only cache format that is wanted. Layers are offloaded to the host where plans would not fit, unless
    `offload` is False; they may take `host_memory` there, by default `memory_utilization` of this machine's if `gpu` is
    "auto", else HOST_MEMORY_BYTES. Sizes may be texts, such as "128k" and "24GB". Raises PlanError,
    UnknownModel, UnknownHardware, ProfileError (all ValueError) for bad input, and NothingFits.
    """
    asked = ask(
        model, gpu, ctx, batch=batch, new_tokens=new_tokens, quality=quality, objective=objective,
        memory_limit=memory_limit, memory_utilization=memory_utilization, profile=profile,
        acceptance=acceptance, yarn=yarn, backend=backend, kv_format=kv_format, offload=offload,
        host_memory=host_memory,
    )  # fmt: skip
    return _answer(asked, memory_limit, memory_utilization)


def _answer(asked: Question, memory_limit: float | str | None, memory_utilization: float) -> Recommendation:
    question = asked.as_executed
    candidates = _ranked(search(question))
    possible = _possible(candidates, question)
    if not possible:
        raise why_nothing_fits(question, memory_utilization)
    alone = any(not one.host_bytes for one in possible)  # whether anything fits without the host
    level, best_of_all = contenders(possible, question), _best_of_all(asked, candidates, possible[0])
    listed = _listed(candidates, [*possible[:MAX_UNNAMED], *level])
    plans = [autoregressive(asked.workload), *(one.plan for one in listed)]
    baseline, *predicted = predict_all(plans, question.shape, question.profile, question.machine)
    predictions = dict(zip(listed, predicted, strict=True))
    winner = chosen(level, sampled_scores([predictions[one] for one in level], question))
    return Recommendation(
        shape=question.shape,
        plan=winner.plan,
        name=winner.name,
        predicted=_compared(predictions[winner], baseline, question),
        baseline=baseline,
        best_estimated=best_of_all and _estimated(*best_of_all, predictions, baseline),
        alternatives=tuple(_alternatives(listed, winner, predictions, baseline, question)),
        losses=tuple(stated_losses(winner.plan, saved_rows())),
        notes=(*_placed(predictions[winner], alone, question), *_of_engine(question), *asked.notes(memory_limit)),
        memory_limit_bytes=question.memory_limit_bytes,
        host_limit_bytes=question.host_limit_bytes,
        on_device=() if alone else on_device(question, memory_utilization),
        model_runs=missing_architecture(asked.shape) is None and not asked.profile.hardware.is_amd,
        backend=question.backend,
        adaptive=_adaptive(winner.plan, question),
    )


def _possible(candidates: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Those that run and fit; with other sizes of groups, which may fit the device alone, where the best does not."""
    found = [one for one in candidates if one.rejection(question) is None]
    if found and not found[0].host_bytes:
        return found
    return _best_sizes(_ranked([*found, *tightest(replace(question, offload=False))]) or _ranked(tightest(question)))


def _best_sizes(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The first of those that differ in sizes of groups alone, which have one name."""
    best: dict[object, Candidate] = {}
    for one in ranked:
        best.setdefault((one.name, one.host_bytes > 0), one)
    return list(best.values())


def _placed(predicted: Prediction, alone: bool, question: Question) -> Iterator[str]:
    """That layers are on the host although plans without them fit, which are slower."""
    if alone and predicted.offloaded_layers:
        yield f"{on_host_text(predicted, question.host_limit_bytes)}; slower without"


def _of_engine(question: Question) -> Iterator[str]:
    """That times are not the engine's that is to execute the plan."""
    if question.backend in ENGINE_FORMATS:
        yield f"times are of ridgeplan's kernels; `ridgeplan export` says {question.backend}'s"


def _adaptive(plan: Plan, question: Question) -> Plan | None:
    """The plan with an adaptive gamma: up to the next larger one if that fits into memory, else up to its own."""
    if not plan.speculation.active or question.objective is Objective.MEMORY:
        return None
    forms = (
        replace(plan, speculation=replace(plan.speculation, gamma=gamma, adaptive=True))
        for gamma in (next_gamma(plan.speculation.gamma), plan.speculation.gamma)
    )
    machine, limit_bytes = question.machine, question.memory_limit_bytes
    return next((one for one in forms if peak_bytes(one, question.shape, machine) <= limit_bytes), None)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """From the best to the worst; of equally good plans the preferred one first."""
    by_score = groupby(sorted(candidates, key=_score), _score)
    groups = (list(group) for _, group in by_score)
    return [one for group in groups for one in (sorted(group, key=_preference) if len(group) > 1 else group)]


def _score(candidate: Candidate) -> float:
    return candidate.score


def _preference(candidate: Candidate) -> tuple[float, ...]:
    return preference(candidate.plan)


def _listed(candidates: Sequence[Candidate], possible: Sequence[Candidate]) -> list[Candidate]:
    """The best of those that run and fit, the best few unnamed families, and all presets."""
    unnamed = [one for one in candidates if one.name not in PRESETS][:MAX_UNNAMED]
    return list(dict.fromkeys([*possible, *unnamed, *(one for one in candidates if one.name in PRESETS)]))


def _compared(predicted: Prediction, baseline: Prediction, question: Question) -> Prediction:
    """With the speed-up over plain decoding, and the probability that there is one."""
    tpot_ms, plain_ms = sampled_tpot_ms([predicted, baseline], question.profile)
    return replace(predicted.against(baseline), beats_plain=float((tpot_ms < plain_ms).mean()))


def _best_of_all(
    asked: Question, candidates: Sequence[Candidate], fastest: Candidate
) -> tuple[Candidate, Question] | None:
    """The best plan of all, on whatever runtime, and its question; None if it is one that runs.

    Weights that the runtime converts could also be kept as the checkpoint has them, which is searched apart.
    """
    questions = [(asked.as_executed, candidates)]
    if is_converted(asked.shape):
        questions.append((asked, search(asked)))
    faster = [
        (one, question)
        for question, found in questions
        for one in found
        if one.score < fastest.score and one.exclusion(question) is None and one.unsupported(question)
    ]
    return min(faster, key=lambda pair: pair[0].score, default=None)


def _estimated(
    best: Candidate, question: Question, predictions: Mapping[Candidate, Prediction], baseline: Prediction
) -> Alternative:
    predicted = predictions.get(best)
    if predicted is None:  # one of the checkpoint's own weights is not among the alternatives
        (predicted,) = predict_all([best.plan], question.shape, question.profile, question.machine)
    return Alternative(best.name, best.plan, _compared(predicted, baseline, question), best.rejection(question) or "")


def _alternatives(
    listed: Sequence[Candidate],
    winner: Candidate,
    predictions: Mapping[Candidate, Prediction],
    baseline: Prediction,
    question: Question,
) -> list[Alternative]:
    """First the plans that only lost, then those that are ruled out; each from the best to the worst."""
    others = _ranked([one for one in listed if one is not winner])
    reasons = {one.plan: one.rejection(question) for one in others}
    others.sort(key=lambda one: reasons[one.plan] is not None)
    return [
        Alternative(
            one.name,
            one.plan,
            predictions[one].against(baseline),
            reasons[one.plan] or _lost(one, winner, question),
        )
        for one in others
    ]


def _lost(one: Candidate, winner: Candidate, question: Question) -> str:
    times, memory = one.score / winner.score, question.objective is Objective.MEMORY
    figure = "memory" if memory else "time"
    preferred = preference(winner.plan) < preference(one.plan)
    if times < 1 and not preferred:
        return f"surely slower than the fastest plan: {times:.2f}x the recommended plan's {figure}"
    if times <= 1 and preferred:
        reason = f"the recommended plan is {why_preferred(winner.plan, one.plan)}"
        return f"within the noise: {times:.2f}x the recommended plan's {figure}, and {reason}"
    return f"{'larger' if memory else 'slower'}: {times:.2f}x the recommended plan's {figure}"


__all__ = ["Candidate", "NothingFits", "Objective", "Question", "best_of_preset", "notes", "recommend", "search"]
