"""Search over families of plans: the space of formats, selections and gammas, and the best candidate of each family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import proposal_acceptance
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.lowering import rates_of, reshaped, stack, strategy_of
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.question import Objective, Question
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.drafters import pass_tokens
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
    """Plans that differ only in gamma and ratio: a template, and the values of both. A drafter follows gamma.

    Budgets of lossy policies are the template's: fewer tokens are always faster, and a latency model cannot weigh that
    against the loss of quality.
    """

    name: str
    template: Plan
    gammas: tuple[int, ...]
    ratios: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of plans in the grid."""
        return len(self.gammas) * len(self.ratios)

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """gamma and ratio of every plan, each [size]."""
        return np.repeat(self.gammas, len(self.ratios)), np.tile(self.ratios, len(self.gammas))

    def plan(self, gamma: int, ratio: float) -> Plan:
        """The plan at one point of the grid."""
        speculation = self.template.speculation
        _, passes, depth = self.round(int(gamma))
        drafter = replace(speculation.drafter, passes=passes * (depth > 0), depth=depth)
        speculation = replace(speculation, gamma=int(gamma), drafter=drafter)
        return replace(self.template, speculation=speculation.with_ratio(float(ratio)))

    def round(self, gamma: int) -> RoundShape:
        """The round of the plan with this gamma: of a cascade, with the fewest passes that are expected to draft it."""
        drafter = self.template.speculation.drafter
        if not drafter.active:
            return round_shape(gamma)
        if not drafter.cascades:
            return RoundShape(gamma, 0, gamma)
        known = proposal_acceptance(drafter.kind, self.template.workload)
        passes = math.ceil(gamma / float(pass_tokens(known.hit, known.best, drafter.depth)))
        return RoundShape(gamma, min(gamma, max(passes, -(-gamma // (drafter.depth + 1)))), drafter.depth)


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

    A single new token follows the prompt, so that there is none to draft.
    """
    drafter = plan.speculation.drafter
    if plan.speculation.active and plan.workload.new_tokens == 1:
        return False
    known = not drafter.active or proposal_acceptance(drafter.kind, plan.workload).known
    return known and plan.speculation.selection.searched


SEARCHED_DEPTH = 4  # proposals of a cascade; those that the target verifies are as many as gamma


def _with_drafters(joint: Sequence[Plan], workload: Workload) -> Iterator[Plan]:
    """Plans whose drafter feeds the target, and cascades over self-drafts that read all tokens.

    A head reads the window that it was trained with.
    """
    window = head_settings(workload.drafter_head).window if workload.drafter_head else 0
    for plan, kind in product(joint, DrafterKind):
        if kind is DrafterKind.NONE or plan.eviction.active or plan.speculation.sparse:
            continue
        passes = int(plan.speculation.active)
        drafter = Drafter(kind, SEARCHED_DEPTH if passes else 1, passes, window=window * (kind is DrafterKind.HEAD))
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
    for name, policy in SELECTIONS.items():
        speculation = Speculation(1, codes, make_selection(name))
        missing_codes = speculation.selection.needs_codes and not plain.kv.format.quantized
        if missing_codes or not policy.searched or (speculation.sparse and plain.eviction.active):
            continue
        if not speculation.sparse and codes is DraftCodes.FULL and not weights.draft_differs:
            continue  # the draft would be the target itself
        yield replace(plain, weights=weights, speculation=speculation)


def family_of(name: str, template: Plan) -> Family:
    """All plans that differ from the template only in gamma and ratio."""
    speculation, gammas = template.speculation, GAMMAS
    drafter = speculation.drafter
    if drafter.active and not drafter.cascades:  # no more proposals than were measured
        gammas = GAMMAS[: proposal_acceptance(drafter.kind, template.workload).depth]
    gammas = gammas[: max(template.workload.new_tokens - 1, 1)]
    return Family(
        name,
        template,
        gammas=gammas if speculation.active else (0,),
        ratios=RATIOS if speculation.sparse else (1.0,),
    )


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
    """The best plan of every family of the search space, or of those given."""
    if searched is None:
        offload = question.options.offload and not fits_whole(question)
        known = question_families(question, offload)
        searched = tuple(family for family in known if missing_cost_model(family.template, question.shape) is None)
        if question.engine is not None:  # whose times hold for no plan that it does not run
            searched = tuple(family for family in searched if question.unsupported(family.template) is None)
    machine, grid = question.machine, _GammaRatioGrid.of(searched)
    templates = [strategy_of(family.template, question.shape, machine, 1.0) for family in searched]
    rates = [rates_of(family.template, question.shape, machine) for family in searched]
    once, column = [1] * len(searched), (len(searched), 1, 1)
    axes = {"gamma": grid.gamma, "draft_ratio": grid.ratio, "acceptance": _acceptance(searched, grid, question)}
    if any(family.template.speculation.drafter.active for family in searched):
        rows = zip(searched, grid.gamma[:, :, 0], strict=True)
        rounds = [[family.round(int(gamma)) for gamma in row] for family, row in rows]
        _, passes, depth = np.moveaxis(np.array(rounds), 2, 0)[..., None]
        axes |= {"proposals": depth, "cascade_passes": passes * (depth > 0)}
    strategy = reshaped(stack(templates, once), column).with_terms(**axes)
    estimate = evaluate(question.shape, machine, strategy, reshaped(stack(rates, once), column))
    return list(_best_of_each(searched, grid, estimate, question))


@dataclass(frozen=True)
class _GammaRatioGrid:
    """gamma [families, gammas, 1] and ratio [families, 1, ratios], so that what depends on one is computed for it only.

    Families with fewer values repeat their last one.
    """

    gamma: np.ndarray
    ratio: np.ndarray

    @classmethod
    def of(cls, searched: Sequence[Family]) -> _GammaRatioGrid:
        """The grids of some families."""
        gamma, ratio = (_padded([getattr(family, axis) for family in searched]) for axis in ("gammas", "ratios"))
        return cls(gamma[:, :, None], ratio[:, None, :])

    @property
    def shape(self) -> tuple[int, ...]:
        """[families, gammas, ratios]."""
        return np.broadcast_shapes(self.gamma.shape, self.ratio.shape)

    def plan(self, family: Family, index: int, point: int) -> Plan:
        """The plan of the family with an index, at one point of its grid."""
        gamma, ratio = divmod(point, self.shape[2])
        return family.plan(self.gamma[index, gamma, 0], self.ratio[index, 0, ratio])


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    longest = max(map(len, rows))
    return np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows], dtype=float)


def _acceptance(searched: Sequence[Family], grid: _GammaRatioGrid, question: Question) -> np.ndarray:
    """The conditional acceptance at which every plan competes, in the shape of the grid."""
    model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
    gamma, ratio = (np.broadcast_to(axis, grid.shape).reshape(len(searched), -1) for axis in (grid.gamma, grid.ratio))
    acceptance = model.competing_of_all([family.template for family in searched], list(zip(gamma, ratio, strict=True)))
    return np.reshape(acceptance, grid.shape)


def named_plan(name: str, workload: Workload) -> Plan:
    """The preset, or the plan of the space with these axes in their long or short form. Raises PlanError."""
    if name not in PRESETS:
        for family in families(workload, offload=True, quality=Quality.LOSSY, stored=True):
            described = describe(family.template)
            if name.casefold() in (family.name.casefold(), described.casefold(), short_name(described)):
                return family.template
    return preset_of(name, workload)


def best_of_preset(name: str, question: Question) -> Candidate:
    """The named preset at its fastest gamma and ratio that fit, as `recommend` lists it. Raises PlanError."""
    plan = named_plan(name, question.workload)
    question.require_engine_runs(plan)
    (candidate,) = search(question, (family_of(name, plan),))
    return candidate


def fits_whole(question: Question) -> bool:
    """Whether plain decoding fits without offloading."""
    machine = question.machine
    plain = strategy_of(autoregressive(question.workload), question.shape, machine, 1.0)
    return bool(resident_memory(question.shape, machine, plain).peak <= question.memory_limit_bytes)


def _best_of_each(
    searched: tuple[Family, ...], grid: _GammaRatioGrid, estimate: Estimate, question: Question
) -> Iterator[Candidate]:
    """For each family, the fitting plan with the lowest objective; if none fits, the one that needs least memory.

    Plans of the joint space that may offload but need not are skipped, as they are listed without offloading too.
    """
    figures = (
        score_of(estimate, question), estimate.tpot_s, estimate.memory.peak, estimate.host_bytes,
        estimate.offloaded_layers,
    )  # fmt: skip
    score, tpot, peak, host, offloaded = (
        np.broadcast_to(np.asarray(figure, dtype=float), grid.shape).reshape(len(searched), -1) for figure in figures
    )
    fits = question.fits(peak, host)
    ranked = np.where(fits.any(axis=1, keepdims=True), np.where(fits, score, math.inf), peak)
    for index, (family, best) in enumerate(zip(searched, ranked.argmin(axis=1), strict=True)):
        if family.template.placement.offload and family.name not in PRESETS and not offloaded[index, best]:
            continue
        plan = within_limit(grid.plan(family, index, int(best)), question.memory_limit_bytes)
        yield Candidate(family.name, plan, *(float(figure[index, best]) for figure in (score, tpot, peak, host)))


def within_limit(plan: Plan, limit_bytes: float) -> Plan:
    """The plan with a limit of memory, at which layers leave, if any may."""
    if not plan.placement.offload:
        return plan
    return replace(plan, placement=replace(plan.placement, memory_bytes=int(limit_bytes)))


def score_of(estimate: Estimate, question: Question) -> Term:
    """What the question minimizes."""
    return {
        Objective.LATENCY: estimate.tpot_s,
        Objective.TOTAL: estimate.ttft_s + question.workload.new_tokens * estimate.tpot_s,
        Objective.MEMORY: estimate.memory.peak,
    }[question.options.objective]
