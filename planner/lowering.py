"""Lowering of plans to the cost model: the strategy of a plan, its rates on a machine, its rounds at each gamma.

What adaptive gamma (runtime/speculation/gamma_control.py) and tuning (validate/tuning) choose by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import (
    Device,
    Machine,
    PassRates,
    StrategyRates,
    attention_kind,
    linear_kind,
    prefill_attention_kind,
    scan_kind,
    sparse_attention_kind,
)
from ridgeplan.roofline.ops import TWO_BITS, UPPER_BITS
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.roofline.plan.plan import DraftCodes, HostPart, KVFormat, Plan, require
from ridgeplan.roofline.plan.policies import draft_selection, evicted_to, eviction_settings, target_selection
from ridgeplan.roofline.plan.policies.base import SelectionCost, unpriced
from ridgeplan.roofline.plan.policies.evictions import kept_tokens
from ridgeplan.roofline.speculation import RoundCosts
from ridgeplan.roofline.strategy import UNLIMITED_BYTES, UNLIMITED_TOKENS, Strategy

DRAFT_PLANE_BITS = TWO_BITS + UPPER_BITS  # of keys, and of values by token, per element of the keys
CODE_PLANES = {KVFormat.FULL: 0, KVFormat.SHADOW: 1, KVFormat.INT8: 2, KVFormat.HIERARCHICAL: 2}


def strategy_of(plan: Plan, shape: ModelShape, device: Device, acceptance: float) -> Strategy:
    """The plan's axes as plain numbers. Raises PlanError for what is not modelled: several GPUs, some policies."""
    require(plan.tensor_parallel == 1, f"tensor_parallel is {plan.tensor_parallel}; allowed: 1 for a prediction")
    problem = unpriced(plan, shape)
    require(problem is None, problem or "")
    workload, kv, weights, speculation = plan.workload, plan.kv, plan.weights, plan.speculation
    # "16 bits" means the checkpoint's own format: some are published in 8 or 4 bits and stay so. The parts that hold
    # fewer bits than the widest cost what they hold (`stored_bytes`).
    full_bytes = shape.weight_bits.widest_bytes(device.element_bytes)
    head_bytes = shape.weight_bits.full_bytes("head", device.element_bytes)
    choosing, target_reads = draft_selection(plan).cost(speculation.selection), target_selection(plan)
    target_choosing = target_reads.cost(plan.attention.selection) if target_reads else SelectionCost()
    evicting = eviction_settings(plan)
    return Strategy(
        batch=workload.batch,
        context=workload.context,
        new_tokens=workload.new_tokens,
        target_weight_bytes=weight_bytes(weights.target_bits, weights.group, full_bytes),
        draft_weight_bytes=weight_bytes(weights.draft_bits, weights.group, full_bytes),
        target_head_bytes=min(weight_bytes(target_head_bits(plan), weights.group, head_bytes), head_bytes),
        draft_head_bytes=min(weight_bytes(draft_head_bits(plan), weights.group, head_bytes), head_bytes),
        has_draft_weights=int(weights.draft_copy),
        target_dense=int(weights.target_bits == 16),
        target_head_dense=int(target_head_bits(plan) == 16),
        draft_dense=int(weights.draft_bits == 16),
        stores_full_kv=int(target_code_bits(plan) == 0),
        code_planes=CODE_PLANES[kv.format],
        kv_group=kv.group,
        target_bits=target_code_bits(plan),
        draft_bits=draft_code_bits(plan),
        eviction_budget=_mean_kept(plan, shape.layers),
        scored_queries=evicting.scored_queries if evicting else 0,
        appended_tokens=evicting.appended_tokens if evicting else 0,
        eviction_chunk=plan.eviction.chunk or UNLIMITED_TOKENS,
        **_placement_terms(plan, shape, choosing, target_choosing),
        **_choice_terms(plan, shape, choosing, target_choosing),
        gamma=speculation.gamma,
        acceptance=acceptance,
        reserved_gamma=speculation.gamma if speculation.adaptive else 0,
    )


def _choice_terms(plan: Plan, shape: ModelShape, drafts: SelectionCost, target: SelectionCost) -> dict[str, float]:
    """What of the strategy is about tokens that steps choose to read. drafts, target: what their choices cost."""
    selection, reads = plan.speculation.selection, plan.attention.selection
    layers, kv_heads = shape.layers, shape.kv_heads
    moved_bytes = drafts.moved_score_bytes(kv_heads) * drafts.choices_of(layers)
    draft_scores = drafts.scores_at_once(layers) if selection.per_query else layers
    held_score_bytes = drafts.held_score_bytes(kv_heads) * draft_scores
    held_score_bytes += target.held_score_bytes(kv_heads) * target.scores_at_once(layers)
    draft_choices, target_choices = drafts.times_of(layers), target.times_of(layers)
    return {
        "target_budget": plan.attention.budget or UNLIMITED_TOKENS,
        "draft_ratio": plan.speculation.ratio,
        "draft_floor_tokens": selection.least_tokens,
        "target_selects": int(plan.attention.active),
        "target_ahead": int(reads.ahead),
        "target_alike": int(reads.ahead and target.chosen_once),
        "target_two_bit": int(reads.needs_codes),
        "draft_two_bit": int(selection.needs_codes),
        "target_page_tokens": target.run_tokens if plan.attention.active else 1,
        "draft_page_tokens": drafts.run_tokens if plan.speculation.sparse else 1,
        "target_run_tokens": target.run_of(kv_heads),
        "draft_run_tokens": drafts.run_of(kv_heads),
        "target_scored_keys": target.scored_keys_of(layers),
        "draft_scored_keys": drafts.scored_keys_of(layers),
        "target_projected_params": target.projected_params(shape),
        "draft_projected_params": drafts.projected_params(shape),
        "target_score_bytes": target.moved_score_bytes(kv_heads) * target.choices_of(layers),
        "target_ranked": target.ranked_scores(kv_heads) * target.choices_of(layers),
        "draft_ranked": drafts.ranked_scores(kv_heads) * drafts.choices_of(layers),
        "step_score_bytes": moved_bytes * selection.per_query,
        "round_score_bytes": moved_bytes * (not selection.per_query),
        "target_choices": target_choices,
        "draft_choices": draft_choices,
        "held_plane_bits": DRAFT_PLANE_BITS * layers * plan.gathers_codes,
        "held_keys": drafts.held_keys * draft_choices + target.held_keys * target_choices,
        "held_score_bytes": held_score_bytes,
    }


def _placement_terms(plan: Plan, shape: ModelShape, drafts: SelectionCost, target: SelectionCost) -> dict[str, float]:
    """What of the strategy is about layers on the host. drafts, target: what their choices cost."""
    placement, context, speculation = plan.placement, plan.workload.context, plan.speculation
    drafted = float(speculation.selection.share_of(context, speculation.ratio)) * context
    overlap = target.overlap_at(plan.attention.budget) if plan.attention.active else drafts.overlap_at(drafted)
    tables = plan.attention.active * target.choices_of(shape.layers) / shape.layers  # one for layers that choose alike
    return {
        "offload": int(placement.offload),
        "offload_budget": placement.budget or UNLIMITED_TOKENS,
        "offload_lower": int(placement.part is HostPart.LOWER),
        "offload_prefetch": placement.prefetch,
        "memory_limit_bytes": placement.memory_bytes or UNLIMITED_BYTES,
        "draft_loads": int(plan.loads_chosen and plan.speculation.sparse),
        "slot_table_bytes": tables * target.slot_table_bytes(shape.kv_heads),
        "overlap": overlap * placement.elastic,
    }


def _mean_kept(plan: Plan, layers: int) -> float:
    """Tokens of the workload's prompt that stay in a layer, the mean over the layers."""
    budgets = evicted_to(plan, layers)
    if not budgets:
        return UNLIMITED_TOKENS
    return sum(kept_tokens(plan.workload.context, budgets, plan.kv.step)) / layers


def rates_of(plan: Plan, shape: ModelShape, machine: Machine) -> StrategyRates:
    """Rates of the kernel classes that the plan's formats and selections use."""
    return _rates_by(kernel_class, plan, shape, machine)


def dense_rates_of(plan: Plan, shape: ModelShape, machine: Machine) -> StrategyRates:
    """The same where chosen tokens are read by kernels that read all of them as fast."""
    return _rates_by(_dense_class, plan, shape, machine)


def _rates_by(
    class_of: Callable[[Plan, ModelShape, str, str], str], plan: Plan, shape: ModelShape, machine: Machine
) -> StrategyRates:
    def of(part: str) -> PassRates:
        kinds = ("linear", "head", "attention")
        return PassRates(*(machine.rates[class_of(plan, shape, part, kind)] for kind in kinds))

    return StrategyRates(target=of("target"), draft=of("draft"))


def kernel_class(plan: Plan, shape: ModelShape, part: str, kind: str) -> str:
    """The calibrated class of an operation's kind in one part of the work: "prefill", "draft" or "target"."""
    chosen = _chosen_class(plan, shape, part) if kind == "attention" else None
    return chosen or _dense_class(plan, shape, part, kind)


def selection_classes(plan: Plan, shape: ModelShape, part: str) -> Iterator[str]:
    """The classes by which choosing tokens is priced in one part of the work, beside the attention to them.

    Drafts scan 2-bit keys within their attention.
    """
    policy, selection = {
        "draft": (draft_selection(plan), plan.speculation.selection),
        "target": (target_selection(plan), plan.attention.selection),
    }[part]
    if policy is None or _chosen_class(plan, shape, part) is None:
        return
    cost = policy.cost(selection)
    if cost.score_rows:
        yield "top_k"
    if selection.needs_codes and part == "target":
        yield scan_kind("two_bit_scan", shape.q_heads, shape.kv_heads)
    if cost.scored_keys:
        yield "key_scan"


def _chosen_class(plan: Plan, shape: ModelShape, part: str) -> str | None:
    """The class of attention to chosen tokens; None where all are read."""
    if part == "draft":
        if not plan.speculation.sparse:
            return None
        own = plan.speculation.selection.attention_class
        listed = sparse_attention_kind(draft_code_bits(plan))
        return scan_kind(own, shape.q_heads, shape.kv_heads) if own else listed
    return sparse_attention_kind(target_code_bits(plan)) if plan.attention.active else None


def _dense_class(plan: Plan, shape: ModelShape, part: str, kind: str) -> str:
    drafting = part == "draft"
    if kind == "head":
        bits = draft_head_bits(plan) if drafting else target_head_bits(plan)
        return "head" if bits == 16 else linear_kind(bits)
    if kind == "linear":
        bits = plan.weights.draft_bits if drafting else plan.weights.target_bits
        return "prefill_linear" if part == "prefill" else linear_kind(bits)
    if kind == "prefill_attention":
        return prefill_attention_kind(shape.head_dim)
    if kind == "attention":
        return attention_kind(draft_code_bits(plan) if drafting else target_code_bits(plan), shape.head_dim)
    return kind


def target_head_bits(plan: Plan) -> int:
    """Bits of the target's output head: 8 of 8-bit weights; with 4-bit ones it stays in full precision."""
    return 8 if plan.weights.target_bits == 8 else 16


def draft_head_bits(plan: Plan) -> int:
    """Bits of the output head that drafts use: those of the weights that they read, or of the target's head."""
    return plan.weights.draft_bits if plan.weights.draft_differs else target_head_bits(plan)


def target_code_bits(plan: Plan) -> int:
    """Bits of the codes the target reads; 0 where it reads full precision."""
    return 8 if plan.kv.target_bits == 8 else 0


def draft_code_bits(plan: Plan) -> int:
    """Bits of the codes drafts read: 4 with upper codes, else the same as the target."""
    return 4 if plan.speculation.codes is DraftCodes.UPPER else target_code_bits(plan)


def stack(items: Sequence[Any], counts: Sequence[int]) -> Any:
    """Stacks dataclasses of numbers into one of arrays, item i repeated counts[i] times; those inside them too.

    A field that is equal in all items stays a number, which is cheaper to compute with than an array.
    """
    return _stacked(items, np.repeat(np.arange(len(items)), counts))


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Dataclasses and tuples of numbers and arrays, with every number and array changed."""
    if isinstance(values, tuple):
        return tuple(mapped(change, one) for one in values)
    if is_dataclass(values) and not isinstance(values, type):
        return type(values)(**{f.name: mapped(change, getattr(values, f.name)) for f in fields(values)})
    return change(values)


def reshaped(values: Any, shape: tuple[int, ...]) -> Any:
    """Dataclasses and tuples of numbers and arrays, the arrays in another shape; numbers stay."""
    return mapped(lambda one: one.reshape(shape) if isinstance(one, np.ndarray) else one, values)


def _stacked(items: Sequence[Any], index: np.ndarray) -> Any:
    """Items stacked by index; what is equal in all of them stays as it is."""
    first = items[0]
    if all(item is first or item == first for item in items):
        return first
    if not (isinstance(first, tuple) or is_dataclass(first)):
        return np.asarray(items, dtype=float)[index]
    places: dict[int, int] = {}  # rates are few objects, which many plans share
    shared = np.array([places.setdefault(id(item), len(places)) for item in items])
    items, index = list({id(item): item for item in items}.values()), shared[index]
    if isinstance(first, tuple):
        return tuple(_stacked(part, index) for part in zip(*items, strict=True))
    values = {f.name: _stacked([getattr(item, f.name) for item in items], index) for f in fields(first)}
    return type(first)(**values)  # type: ignore[misc]


def round_costs(plan: Plan, shape: ModelShape, profile: Profile, gammas: Sequence[int] = ()) -> RoundCosts:
    """Costs at the plan's gammas, or at those given, and at 0; averaged over the generation of the plan's workload."""
    wanted = sorted({0, *(gammas or plan.speculation.gammas)})
    found = estimate_gammas(plan, shape, profile, Machine.of(profile), wanted)
    acceptance = AcceptanceModel.of_profile(shape, plan.workload.context, profile).of(plan).best
    return RoundCosts(dict(zip(wanted, map(float, found.round.total_s), strict=True)), acceptance)


def estimate_gammas(
    plan: Plan, shape: ModelShape, profile: Profile, machine: Machine, gammas: Sequence[int]
) -> Estimate:
    """The plan at every gamma of `gammas`, each at the acceptance that is predicted for it."""
    model = AcceptanceModel.of_profile(shape, plan.workload.context, profile)
    gamma = np.asarray(gammas)
    acceptance = model.best(plan, gamma, np.full(len(gamma), plan.speculation.ratio))
    strategy = replace(strategy_of(plan, shape, machine, 1.0), gamma=gamma, acceptance=acceptance)
    return evaluate(shape, machine, strategy, rates_of(plan, shape, machine))


def settled_gamma(plan: Plan, shape: ModelShape, profile: Profile, machine: Machine) -> int:
    """The gamma that an adaptive plan settles at where drafts are accepted as predicted; a fixed plan's own."""
    gammas = plan.speculation.gammas
    if len(gammas) == 1:
        return plan.speculation.gamma
    return gammas[int(np.argmin(estimate_gammas(plan, shape, profile, machine, gammas).tpot_s))]
