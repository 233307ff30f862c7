"""Search over families of plans: the space of formats, selections and gammas, and the best candidate of each family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import proposal_acceptance
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.lowering import adaptation, rates_of, reshaped, stack, strategy_of
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.question import Objective, Question
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.execution import RoundShape, round_shape
from ridgeplan.roofline.memory import resident_memory
from ridgeplan.roofline.plan.plan import (
    MAX_GAMMA,
    DraftCodes,
    Drafter,
    DrafterKind,
    Eviction,
    HostPart,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    PlanError,
    Speculation,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policy import KV_BUDGET, SELECTIONS, make_selection
from ridgeplan.roofline.plan.presets import PRESETS, autoregressive, describe, family_key, short_name
from ridgeplan.roofline.plan.presets import preset as preset_of
from ridgeplan.roofline.plan.support import missing_cost_model

RATIOS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5)
GAMMAS = tuple(range(1, MAX_GAMMA + 1))


@dataclass(frozen=True)
class Family:
    """Plans that differ only in gamma, ratio and depth: a template, and the values of each. A drafter follows gamma.

    depths: proposals of a cascade at a time; 0 for the template's. No family has several ratios and depths.
    Budgets of lossy policies are the template's: fewer tokens are always faster, and a latency model cannot weigh that
    against the loss of quality.
    """

    name: str
    template: Plan
    gammas: tuple[int, ...]
    ratios: tuple[float, ...]
    depths: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        """Number of plans in the grid."""
        return len(self.gammas) * len(self.ratios) * len(self.depths)

    def plan(self, gamma: int, ratio: float, depth: int = 0) -> Plan:
        """The plan at one point of the grid."""
        speculation, drafter = self.template.speculation, self.template.speculation.drafter
        _, passes, depth = self.round(int(gamma), int(depth))
        drafter = replace(drafter, passes=passes * (depth > 0), depth=depth) if drafter.active else drafter
        speculation = replace(speculation, gamma=int(gamma), drafter=drafter)
        return replace(self.template, speculation=speculation.with_ratio(float(ratio)))

    def round(self, gamma: int, depth: int = 0) -> RoundShape:
        """The round of the plan with this gamma: of a cascade, with the fewest passes that may draft it.

        More passes than these shorten no expected time by more than 1.1% (suffix proposals to Llama-3.1-8B on an H200).
        """
        drafter = self.template.speculation.drafter
        if not drafter.active:
            return round_shape(gamma)
        if not drafter.cascades:
            return RoundShape(gamma, 0, gamma)
        if self.template.speculation.adaptive:
            return RoundShape(gamma, drafter.passes, drafter.depth)
        depth = min(depth or drafter.depth, gamma - 1)  # a pass adds a token to its proposals
        return RoundShape(gamma, -(-gamma // (depth + 1)), depth)


def families(
    workload: Workload, *, offload: bool, quality: Quality = Quality.NEAR_LOSSLESS, stored: bool = False
) -> tuple[Family, ...]:
    """Every preset, and the joint space of weights, cache formats, draft codes and selections that `quality` allows.

    Neither has drafts of a selection that is not `searched`, as their acceptance is unknown.
    `offload` adds plans with layers on the host, for what would not fit otherwise: plain decoding on all formats, and
    drafts where only lower codes leave. How often drafts are accepted that read a few tokens of some layers is not
    known, so that such plans are run but not searched. `stored` adds plans that keep the weights of a GGUF file.
    """
    # What is known of a drafter may change while the program runs.
    make = _families.__wrapped__ if workload.drafter_head or workload.drafter_rows else _families
    return make(workload, offload, quality, stored)


@lru_cache(maxsize=16)
def _families(workload: Workload, offload: bool, quality: Quality, stored: bool) -> tuple[Family, ...]:
    presets = ((name, make(workload)) for name, make in PRESETS.items())
    named = {family_key(plan): (name, plan) for name, plan in presets if is_searched(plan)}
    weights = (*WEIGHTS, STORED) if stored else WEIGHTS
    joint = list(_joint(workload, quality, weights))
    described = workload.text or workload.acceptance_length or workload.drafter_head
    drafted = filter(is_searched, _with_drafters(joint, workload)) if described else ()
    offloaded = filter(is_searched, _offloaded(workload, quality, weights)) if offload else ()
    for plan in (*filter(is_searched, joint), *drafted, *offloaded):
        named.setdefault(family_key(plan), (describe(plan), plan))
    return tuple(family_of(name, plan) for name, plan in named.values())


def question_families(question: Question, offload: bool, workload: Workload | None = None) -> tuple[Family, ...]:
    """The families of a question, at its workload or another, with plans on stored weights where the model has such."""
    stored = question.engine is None and question.shape.weight_bits.stored.layers > 0
    quality = question.options.quality.loosest
    return families(workload or question.workload, offload=offload, quality=quality, stored=stored)


def is_searched(plan: Plan) -> bool:
    """Whether a search considers a plan: not where nothing is known of its drafts, or of its drafter on such a text.

    A single new token follows the prompt, so that there is none to draft. Plans that adapt gamma belong to fixed ones.
    """
    drafter, adapts = plan.speculation.drafter, plan.speculation.adaptive
    if (adapts and not drafter.cascades) or (plan.speculation.active and plan.workload.new_tokens == 1):
        return False
    known = not drafter.active or proposal_acceptance(drafter.kind, plan.workload).known
    return known and plan.speculation.selection.searched


SEARCHED_DEPTHS = (1, 2, 3, 4)  # proposals of a cascade; those that the target verifies are as many as gamma


def _with_drafters(joint: Sequence[Plan], workload: Workload) -> Iterator[Plan]:
    """Plans whose drafter feeds the target, and cascades over self-drafts that read all tokens.

    A head reads the window that it was trained with.
    """
    window = head_settings(workload.drafter_head).window if workload.drafter_head else 0
    for plan, kind in product(joint, DrafterKind):
        if kind is DrafterKind.NONE or plan.eviction.active or plan.speculation.sparse:
            continue
        passes = int(plan.speculation.active)
        drafter = Drafter(
            kind, SEARCHED_DEPTHS[-1] if passes else 1, passes, window=window * (kind is DrafterKind.HEAD)
        )
        yield replace(plan, speculation=replace(plan.speculation, gamma=1, drafter=drafter))


# Cache formats with the codes that drafts read: the upper ones where they are stored.
DRAFT_READS = (
    (KVFormat.FULL, DraftCodes.FULL),
    (KVFormat.INT8, DraftCodes.FULL),
    (KVFormat.SHADOW, DraftCodes.UPPER),
    (KVFormat.HIERARCHICAL, DraftCodes.UPPER),
)
# The target's weights, with those of the drafts, and without drafts.
Both = tuple[Weights, Weights]
WEIGHTS: tuple[Both, ...] = tuple(
    (Weights(bits, draft_bits), Weights(bits, bits)) for bits, draft_bits in ((16, 16), (16, 4), (8, 8), (8, 4), (4, 4))
)
STORED: Both = (Weights(stored=True), Weights(stored=True))


def _joint(workload: Workload, quality: Quality, weights: Sequence[Both]) -> Iterator[Plan]:
    evicted = PRESETS["dapq"](workload).eviction  # the policy that loses least, by published figures
    for eviction, (kv, codes), (drafting, plain) in product((Eviction(), evicted), DRAFT_READS, weights):
        target = Plan(workload, plain, KVCache(kv), eviction=eviction)
        if not quality.admits(target):
            continue
        if codes is DraftCodes.FULL and drafting == plain:
            yield target
        yield from _drafting(target, drafting, codes)


def _offloaded(workload: Workload, quality: Quality, weights: Sequence[Both]) -> Iterator[Plan]:
    budget = min(KV_BUDGET, workload.context)
    for drafting, plain in weights:
        for kv in (KVFormat.FULL, KVFormat.INT8) if drafting == plain else ():
            whole = Plan(workload, plain, KVCache(kv), placement=Placement(True, budget))
            if quality.admits(whole):
                yield whole
        lower = Placement(True, part=HostPart.LOWER)
        halved = Plan(workload, plain, KVCache(KVFormat.HIERARCHICAL), placement=lower)
        if quality.admits(halved):
            yield replace(halved, weights=drafting, speculation=Speculation(1, DraftCodes.UPPER))


def _drafting(plain: Plan, weights: Weights, codes: DraftCodes) -> Iterator[Plan]:
    """Drafts that read all tokens or, if none were evicted, what a policy selects."""
    for speculation in _self_drafts(codes):
        missing_codes = speculation.selection.needs_codes and not plain.kv.format.quantized
        is_target = not (speculation.sparse or weights.draft_differs) and codes is DraftCodes.FULL
        if missing_codes or is_target or (speculation.sparse and plain.eviction.active):
            continue
        yield replace(plain, weights=weights, speculation=speculation)


@cache
def _self_drafts(codes: DraftCodes) -> tuple[Speculation, ...]:
    """One draft of every selection that is searched, which reads these codes."""
    return tuple(Speculation(1, codes, make_selection(name)) for name, policy in SELECTIONS.items() if policy.searched)


def family_of(name: str, template: Plan) -> Family:
    """All plans that differ from the template only in gamma, ratio and depth."""
    speculation, gammas = template.speculation, GAMMAS
    drafter, depths = speculation.drafter, Family.depths
    if drafter.active and not drafter.cascades:  # no more proposals than were measured
        gammas = GAMMAS[: proposal_acceptance(drafter.kind, template.workload).depth]
    elif drafter.active and speculation.adaptive:
        gammas = (speculation.gamma,)
    elif drafter.active:  # a round of one draft has no use for proposals
        gammas, depths = GAMMAS[1:], SEARCHED_DEPTHS
    gammas = gammas[: max(template.workload.new_tokens - 1, 1)]
    ratios = RATIOS if speculation.sparse else (1.0,)
    return Family(name, template, gammas if speculation.active else (0,), ratios, depths)


@dataclass(frozen=True)
class Candidate:
    """The best plan of a family: its objective (lower is better), its peak memory, and what it takes of the host."""

    name: str
    plan: Plan
    score: float
    tpot_s: float
    peak_bytes: float
    host_bytes: float

    def rejection(self, question: Question) -> str | None:
        """Why this plan cannot be recommended, however fast; None if it can."""
        return self.exclusion(question) or question.unsupported(self.plan)

    def exclusion(self, question: Question) -> str | None:
        """Why this plan is no answer, on whatever runtime; None if it is one."""
        return question.oom_reason(self.peak_bytes, self.host_bytes) or question.constraint_violation(self.plan)


def search(question: Question, searched: tuple[Family, ...] | None = None) -> list[Candidate]:
    """The best plan of every family of the search space, or of those given.

    Plans of the joint space that may offload but need not are skipped, as they are listed without offloading too.
    """
    if searched is None:
        offload = question.options.offload and not fits_whole(question)
        known = question_families(question, offload)
        searched = tuple(family for family in known if missing_cost_model(family.template, question.shape) is None)
        if question.engine is not None:  # whose times hold for few plans that it does not run
            searched = tuple(family for family in searched if question.priced(family.template))
    best = figures_of(searched, question, (question.workload,), (question.workload.batch,)).best_of_families
    offloads = best.host_bytes[0, :, 0] > 0
    return [
        best.candidate(family, question, question.workload, (0, place, 0))
        for place, family in enumerate(searched)
        if offloads[place] or family.name in PRESETS or not family.template.placement.offload
    ]


@dataclass(frozen=True)
class Figures:
    """Plans at sizes: of some families, [contexts, families, plans, batches], or one of each. Seconds and bytes.

    score: what is minimized. fits: False for plans that are ruled out at a size.
    """

    gamma: np.ndarray
    ratio: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    tpot_s: np.ndarray
    ttft_s: np.ndarray
    request_ttft_s: np.ndarray
    peak_bytes: np.ndarray
    host_bytes: np.ndarray
    fits: np.ndarray

    def best(self, axis: int) -> np.ndarray:
        """Place along an axis, which stays, of the best score among the plans that fit, else of the least memory."""
        score = np.where(self.fits, self.score, math.inf)
        ranked = np.where(self.fits.any(axis=axis, keepdims=True), score, self.peak_bytes)
        return np.asarray(ranked.argmin(axis=axis, keepdims=True))

    def at(self, places: np.ndarray, axis: int) -> Figures:
        """The plans at one place along an axis, which goes."""
        return Figures(*(np.take_along_axis(values, places, axis).squeeze(axis) for values in vars(self).values()))

    @property
    def best_of_families(self) -> Figures:
        """The best plan of each family: [contexts, families, batches]."""
        return self.at(self.best(axis=2), axis=2)

    def candidate(self, family: Family, question: Question, workload: Workload, at: tuple[int, int, int]) -> Candidate:
        """The best plan of a family, which is at the place `at`, at its workload."""
        plan = plan_at(family, workload, self.gamma[at], self.ratio[at], self.depth[at], question.memory_limit_bytes)
        values = self.score, self.tpot_s, self.peak_bytes, self.host_bytes
        return Candidate(family.name, plan, *(float(each[at]) for each in values))


def figures_of(
    searched: Sequence[Family], question: Question, workloads: Sequence[Workload], batches: Sequence[int]
) -> Figures:
    """Every plan of some families, [contexts, families, plans, batches], at workloads of all batches, one per context.

    The plans of a family are its gammas times its ratios or depths, and what depends on one of these is computed for
    it only. Families with fewer values than others repeat their last one.
    """
    shape, machine, per_family = question.shape, question.machine, (len(searched), 1, 1, 1)
    templates = [[at_workload(family.template, workload) for family in searched] for workload in workloads]
    strategies = [strategy_of(plan, shape, machine, 1.0) for row in templates for plan in row]
    rates = [rates_of(family.template, shape, machine) for family in searched]
    gammas = _padded([family.gammas for family in searched])
    ratios, depths = np.moveaxis(_padded([[*product(each.ratios, each.depths)] for each in searched]), 2, 0)
    gamma, ratio, depth = gammas[:, :, None, None], ratios[:, None, :, None], depths[:, None, :, None]
    contexts = np.array([workload.context for workload in workloads], dtype=float)[:, None, None, None, None]
    rank_batches = np.ceil(np.array(batches, dtype=float) / shape.parallel.data)
    model = AcceptanceModel.of_profile(shape, 1, question.profile)
    models = [replace(model, context=workload.context) for workload in workloads]
    terms = {  # of a single size as numbers, which are cheaper than arrays
        "context": contexts if len(contexts) > 1 else contexts.item(),
        "batch": rank_batches if len(rank_batches) > 1 else rank_batches.item(),
        "gamma": gamma,
        "draft_ratio": ratio,
        "acceptance": _acceptance(models, templates, gammas, ratios),
    }
    if any(family.template.speculation.drafter.active for family in searched):
        terms |= _tiers(searched, templates, gammas, depths.shape[1])
    if any(family.template.speculation.adapts_to_text for family in searched):
        terms["adaptation"] = np.array([
            [adaptation(plan, shape, machine, model, plan.speculation.round_kind, rank_batches) for plan in row]
            for row, model in zip(templates, models, strict=True)
        ])[:, :, None, None]  # fmt: skip
    sized = reshaped(stack(strategies, [1] * len(strategies)), (len(workloads), *per_family)).with_terms(**terms)
    estimate = evaluate(shape, machine, sized, reshaped(stack(rates, [1] * len(rates)), per_family))
    arrays = (
        gamma, ratio, depth, score_of(estimate, question), estimate.tpot_s, estimate.ttft_s, estimate.request_ttft_s,
        estimate.memory.peak, estimate.host_bytes, question.fits(estimate.memory.peak, estimate.host_bytes),
    )  # fmt: skip
    sizes = len(workloads), *gammas.shape, ratios.shape[1], len(batches)
    return Figures(*(np.broadcast_to(each, sizes).reshape(*sizes[:2], -1, sizes[4]) for each in arrays))


def _tiers(
    searched: Sequence[Family], templates: Sequence[Sequence[Plan]], gammas: np.ndarray, choices: int
) -> dict[str, np.ndarray]:
    """Proposals at a time, passes that verify them, [families, gammas, choices, 1], and for workloads their acceptance.

    templates: by workload and family. gammas: [families, gammas].
    """

    @cache
    def accepted(kind: DrafterKind, workload: Workload) -> np.ndarray:
        """By proposals at a time; of plans without a drafter it does not count."""
        acceptance = proposal_acceptance(DrafterKind.SUFFIX if kind is DrafterKind.NONE else kind, workload)
        return np.array([acceptance.at(max(depth, 1))[1] for depth in range(MAX_GAMMA + 1)])

    rounds = [[[family.round(int(gamma), depth) for gamma in row] for depth in family.depths]
              for family, row in zip(searched, gammas, strict=True)]  # fmt: skip
    _, passes, depth = np.moveaxis(_padded(rounds, choices), (3, 1), (0, 3)).astype(int)
    each = [[accepted(plan.speculation.drafter.kind, plan.workload) for plan in row] for row in templates]
    at_depth = np.take_along_axis(np.array(each), depth.reshape(1, len(searched), -1), axis=2)
    return {
        "proposals": depth[..., None],
        "cascade_passes": (passes * (depth > 0))[..., None],
        "proposal_acceptance": at_depth.reshape(len(templates), *depth.shape, 1),
    }


def _padded(rows: Sequence[Sequence[Any]], longest: int = 0) -> np.ndarray:
    longest = longest or max(map(len, rows))
    return np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows], dtype=float)


def _acceptance(
    models: Sequence[AcceptanceModel], templates: Sequence[Sequence[Plan]], gammas: np.ndarray, ratios: np.ndarray
) -> np.ndarray:
    """The conditional acceptance at which every plan competes: [contexts, families, gammas, ratios, 1]."""
    grids = [
        (np.repeat(gamma, len(ratio)), np.tile(ratio, len(gamma))) for gamma, ratio in zip(gammas, ratios, strict=True)
    ]
    acceptance = [at.competing_of_all(row, grids) for at, row in zip(models, templates, strict=True)]
    return np.reshape(acceptance, (len(templates), *gammas.shape, ratios.shape[1], 1))


def named_plan(name: str, workload: Workload) -> Plan:
    """The preset, or the plan of the space with these axes in their long or short form. Raises PlanError."""
    if name not in PRESETS:
        for family in families(workload, offload=True, quality=Quality.LOSSY, stored=True):
            described = describe(family.template)
            if name.casefold() in (family.name.casefold(), described.casefold(), short_name(described)):
                return family.template
    return preset_of(name, workload)


def best_of_preset(name: str, question: Question) -> Candidate:
    """The named preset at its fastest gamma and ratio that fit, as `recommend` lists it.

    Raises PlanError, also for a plan that offloads where everything fits.
    """
    plan = named_plan(name, question.workload)
    question.require_engine_runs(plan)
    candidates = search(question, (family_of(name, plan),))
    if not candidates:
        raise PlanError(f"{name!r} offloads nothing here, as everything fits; allowed: the same without offload")
    return candidates[0]


def fits_whole(question: Question) -> bool:
    """Whether plain decoding fits without offloading."""
    machine = question.machine
    plain = strategy_of(autoregressive(question.workload), question.shape, machine, 1.0)
    return bool(resident_memory(question.shape, machine, plain).peak <= question.memory_limit_bytes)


def plan_at(family: Family, workload: Workload, gamma: float, ratio: float, depth: float, limit_bytes: float) -> Plan:
    """The family's plan at a workload, within a limit of memory."""
    resized = replace(family, template=at_workload(family.template, workload))
    return within_limit(resized.plan(int(gamma), float(ratio), int(depth)), limit_bytes)


def within_limit(plan: Plan, limit_bytes: float) -> Plan:
    """The plan with a limit of memory, at which layers leave, if any may."""
    if not plan.placement.offload:
        return plan
    return replace(plan, placement=replace(plan.placement, memory_bytes=int(limit_bytes)))


def at_workload(plan: Plan, workload: Workload) -> Plan:
    """The plan at another workload, with budgets of at most its context."""
    if plan.workload == workload:
        return plan

    def clamped(part: Any) -> Any:
        return replace(part, budget=min(part.budget, workload.context))

    return replace(
        plan, workload=workload, eviction=clamped(plan.eviction), placement=clamped(plan.placement),
        attention=clamped(plan.attention),
    )  # fmt: skip


def score_of(estimate: Estimate, question: Question) -> Term:
    """What the question minimizes."""
    return {
        Objective.LATENCY: estimate.tpot_s,
        Objective.TOTAL: estimate.ttft_s + question.workload.new_tokens * estimate.tpot_s,
        Objective.MEMORY: estimate.memory.peak,
    }[question.options.objective]
