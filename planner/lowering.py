"""Lowering of plans to the cost model: the strategy of a plan, its rates on a machine, its rounds at each gamma.

Adaptive gamma (runtime/speculation/gamma_control.py) and tuning (validate/tuning.py) choose by these costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.drafters import proposal_acceptance, texts_of
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.roofline.catalog.families import executable_architectures
from ridgeplan.roofline.catalog.model_shape import FULL_BITS, KEPT_FORMAT, ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.execution import (
    GROUPED_EXTRA_ROWS,
    GROUPED_MXFP4_EXTRA_ROWS,
    GROUPED_MXFP4_ROWS,
    GROUPED_ROWS,
    INTEGER_GROUP,
    PROMPT_EXPERTS_SHARE,
    PROMPT_MXFP4_SHARE,
    RUNNING_LOSS,
    RoundKind,
    round_shape,
)
from ridgeplan.roofline.latency import (
    STORED_LINEAR,
    Device,
    Machine,
    PassRates,
    StrategyRates,
    attention_kind,
    experts_kind,
    integer_kind,
    linear_kind,
    prefill_attention_kind,
    scan_kind,
    sparse_attention_kind,
)
from ridgeplan.roofline.memory import hides, mtp_params
from ridgeplan.roofline.ops import TWO_BITS, UPPER_BITS
from ridgeplan.roofline.passes import WINDOWED_ATTENTION, Op, weight_bytes
from ridgeplan.roofline.plan.plan import DraftCodes, DrafterKind, HostPart, KVFormat, Plan, PlanError, require
from ridgeplan.roofline.plan.policies.evictions import kept_tokens, layer_budgets
from ridgeplan.roofline.plan.policy import SelectionCost, TokenSelection
from ridgeplan.roofline.plan.support import missing_cost_model
from ridgeplan.roofline.round import RoundCosts
from ridgeplan.roofline.strategy import (
    HEAD_VOCAB,
    UNLIMITED_BYTES,
    UNLIMITED_TOKENS,
    DraftStrategy,
    EvictionStrategy,
    OffloadStrategy,
    Strategy,
    TargetStrategy,
)

DRAFT_PLANE_BITS = TWO_BITS + UPPER_BITS  # of keys, and of values by token, per element of the keys
CODE_PLANES = {KVFormat.FULL: 0, KVFormat.SHADOW: 1, KVFormat.INT8: 2, KVFormat.HIERARCHICAL: 2}


def strategy_of(plan: Plan, shape: ModelShape, device: Device, acceptance: float) -> Strategy:
    """The plan's axes as numbers, of one GPU of several. shape: sharded by the plan's degrees (`catalog/sharding.py`).

    Raises PlanError for plans without a cost model: policies of some models, or several GPUs for a whole shape.
    """
    if plan.parallel != shape.parallel:
        raise PlanError(f"the plan is for {plan.parallel}; allowed: {shape.parallel} for a prediction of this shape")
    problem = missing_cost_model(plan, shape)
    require(problem is None, problem or "")
    workload, speculation, attention = plan.workload, plan.speculation, plan.attention
    layers, kv_heads = shape.kv_layers, shape.kv_heads
    draft_cost, target_cost = speculation.selection.cost(), attention.selection.cost()
    draft_scores = draft_cost.scores_at_once(layers) if speculation.selection.per_query else layers
    held_score_bytes = draft_cost.held_score_bytes(kv_heads) * draft_scores
    held_score_bytes += target_cost.held_score_bytes(kv_heads) * target_cost.scores_at_once(layers)
    held_score_bytes += target_cost.logit_bytes(shape.q_heads)
    return Strategy(
        batch=workload.rank_batch,
        context=workload.context,
        new_tokens=workload.new_tokens,
        target=_target(plan, shape, device, target_cost),
        draft=_draft(plan, shape, device, draft_cost),
        offload=_offload(plan, shape, draft_cost, target_cost),
        eviction=_eviction(plan, shape),
        stores_full_kv=int(target_code_bits(plan) == 0),
        code_planes=CODE_PLANES[plan.kv.format],
        kv_group=plan.kv.group if device.engine is None else UNLIMITED_TOKENS,  # no engine's rounds end with groups
        held_keys=draft_cost.held_keys * draft_cost.selections_per_step(layers)
        + target_cost.held_keys * target_cost.selections_per_step(layers),
        held_plane_bits=DRAFT_PLANE_BITS * layers * plan.gathers_codes,
        held_score_bytes=held_score_bytes,
        gamma=speculation.gamma,
        acceptance=acceptance,
        reserved_gamma=(speculation.gamma + speculation.overhang) * (speculation.adaptive or speculation.overhang > 0),
        **_drafter(plan, shape),
    )


def _drafter(plan: Plan, shape: ModelShape) -> dict[str, float]:
    """The terms of the plan's drafter."""
    drafter = plan.speculation.drafter
    if not drafter.active:
        return {}
    known, folder = proposal_acceptance(drafter.kind, plan.workload), plan.workload.drafter_head
    settings = head_settings(folder) if folder and drafter.trained else None
    return {
        "proposals": drafter.depth,
        "cascade_passes": drafter.passes,
        "hit": known.hit,
        "proposal_acceptance": known.at(drafter.depth)[1],
        "uses_head": int(drafter.trained),
        "proposes_block": int(drafter.kind is DrafterKind.BLOCK),
        "head_window": drafter.window or UNLIMITED_TOKENS,
        "head_vocab": settings.draft_vocab or shape.vocab if settings else HEAD_VOCAB,
        "mtp_head_params": mtp_params(shape) if settings and settings.method == "mtp" else 0,
    }


def _target(plan: Plan, shape: ModelShape, device: Device, cost: SelectionCost) -> TargetStrategy:
    selection = plan.attention.selection
    return TargetStrategy(
        **_weight_terms(plan, shape, device, plan.weights.target_bits, target_head_bits(plan)),
        **_selection_terms(shape, cost, selection, plan.attention.active),
        dense=int(plan.weights.dense),
        head_dense=int(target_head_bits(plan) == 16 and not _head_in_blocks(plan, shape)),
        table_saved_bytes=_table_saved_bytes(plan, shape, device),
        **_prompt_experts(plan, shape, device),
        bits=target_code_bits(plan),
        score_bytes=_score_bytes(shape, cost),
        budget=plan.attention.budget or UNLIMITED_TOKENS,
        selects=int(plan.attention.active),
        selected_before_pass=int(selection.selected_before_pass),
        keeps_generated=int(plan.attention.keeps_generated),
        shared_across_layers=int(selection.selected_before_pass and cost.chosen_once),
    )


def _draft(plan: Plan, shape: ModelShape, device: Device, cost: SelectionCost) -> DraftStrategy:
    speculation = plan.speculation
    per_query, score_bytes = speculation.selection.per_query, _score_bytes(shape, cost)
    return DraftStrategy(
        **_weight_terms(plan, shape, device, plan.weights.draft_bits, draft_head_bits(plan)),
        **_selection_terms(shape, cost, speculation.selection, speculation.sparse),
        dense=int(plan.weights.draft_bits == 16 and not plan.weights.stored),
        head_dense=int(plan.weights.draft_bits == 16 and not _head_in_blocks(plan, shape)),
        bits=draft_code_bits(plan),
        score_bytes=score_bytes * per_query,
        round_score_bytes=score_bytes * (not per_query),
        query_score_bytes=cost.query_score_bytes(shape.kv_heads) * shape.kv_layers,
        has_weights=int(plan.weights.draft_copy),
        ratio=speculation.ratio,
        min_tokens=speculation.selection.min_tokens,
        loads=int(plan.loads_chosen and speculation.sparse),
    )


def _weight_terms(plan: Plan, shape: ModelShape, device: Device, bits: int, head_bits: int) -> dict[str, float]:
    """Bytes per parameter of a pass whose layers have weights of `bits` bits.

    "16 bits" means the checkpoint's own format, which may be 8 or 4 bits. Parts with fewer bits than the widest cost
    the bytes that they store (`stored_bytes`). Of stored weights all layers' parts have their mean.
    """
    group, held = plan.weights.group, shape.weight_bits
    if plan.weights.stored:
        bytes_each = (
            held.stored.layer_bytes(device.element_bytes),
            held.stored.table_bytes("head", device.element_bytes),
        )
        return dict(zip(("weight_bytes", "head_bytes"), bytes_each, strict=True))
    full_head_bytes = held.full_bytes("head", device.element_bytes)
    return {
        "weight_bytes": weight_bytes(bits, group, held.widest_bytes(device.element_bytes)),
        "head_bytes": min(weight_bytes(head_bits, group, full_head_bytes), full_head_bytes),
    }


def _head_in_blocks(plan: Plan, shape: ModelShape) -> bool:
    """Whether the output head is read in the blocks of a GGUF file."""
    return plan.weights.stored and shape.weight_bits.stored.head < FULL_BITS


def _table_saved_bytes(plan: Plan, shape: ModelShape, device: Device) -> float:
    """Bytes per parameter that the embedding takes less than in full precision; where it is the head's, all of them."""
    if not plan.weights.stored:
        return 0.0
    held, is_head = shape.weight_bits, shape.tied_embeddings and _head_in_blocks(plan, shape)
    apart_bytes = 0.0 if is_head else held.stored.table_bytes("embedding", device.element_bytes)
    return held.full_bytes("embedding", device.element_bytes) - apart_bytes


def _selection_terms(
    shape: ModelShape, cost: SelectionCost, selection: TokenSelection, active: bool
) -> dict[str, float]:
    """Transfers and launches with which a step selects tokens. active: whether the pass attends to a selection."""
    layers, kv_heads = shape.kv_layers, shape.kv_heads
    return {
        "page_tokens": cost.page_tokens if active else 1,
        "host_run_tokens": cost.contiguous_on_host(kv_heads),
        "projected_params": cost.projected_params(shape),
        "scored_keys": cost.scored_keys_per_step(layers),
        "logit_bytes": cost.logit_bytes(shape.q_heads),
        "scans_two_bit": int(selection.needs_codes),
        "top_k_launches": cost.selections_per_step(layers),
        "ranked_scores": cost.ranked_scores(kv_heads) * cost.selected_layers(layers),
        "small_kernels": cost.small_kernels,
        "unbudgeted_tokens": selection.unbudgeted_tokens,
    }


def _score_bytes(shape: ModelShape, cost: SelectionCost) -> float:
    """Bytes of scores that a selection moves per cached token."""
    return cost.moved_score_bytes(shape.kv_heads) * cost.selected_layers(shape.kv_layers)


def _offload(plan: Plan, shape: ModelShape, draft_cost: SelectionCost, target_cost: SelectionCost) -> OffloadStrategy:
    placement, context, speculation = plan.placement, plan.workload.context, plan.speculation
    if plan.attention.active:
        overlap = target_cost.overlap_at(plan.attention.budget, plan.attention.selection.unbudgeted_tokens)
    else:
        overlap = draft_cost.overlap_at(float(speculation.selection.share_of(context, speculation.ratio)) * context)
    # Layers that share a selection share a table
    tables = plan.attention.active * target_cost.selected_layers(shape.kv_layers) / shape.kv_layers
    return OffloadStrategy(
        active=int(placement.offload),
        budget=placement.budget or UNLIMITED_TOKENS,
        lower_only=int(placement.part is HostPart.LOWER),
        prefetch=placement.prefetch,
        adaptive=int(placement.adaptive),
        memory_limit_bytes=placement.memory_bytes or UNLIMITED_BYTES,
        overlap=overlap * placement.elastic,
        slot_table_bytes=tables * target_cost.slot_table_bytes(shape.kv_heads),
    )


def _eviction(plan: Plan, shape: ModelShape) -> EvictionStrategy:
    settings, budgets = plan.eviction.method, layer_budgets(plan, shape.kv_layers)
    kept = kept_tokens(plan.workload.context, budgets, plan.kv.step) if budgets else ()
    return EvictionStrategy(
        budget=sum(kept) / shape.kv_layers if budgets else UNLIMITED_TOKENS,
        scored_queries=settings.scored_queries if settings else 0,
        appended_tokens=settings.appended_tokens if settings else 0,
        chunk=plan.eviction.chunk or UNLIMITED_TOKENS,
    )


def rates_of(plan: Plan, shape: ModelShape, machine: Machine) -> StrategyRates:
    """Rates of the kernel classes that the plan's formats and selections use."""
    return _rates_by(kernel_class, plan, shape, machine)


def dense_rates_of(plan: Plan, shape: ModelShape, machine: Machine) -> StrategyRates:
    """Rates as if selected tokens were read as fast as dense kernels read all tokens."""
    return _rates_by(_dense_class, plan, shape, machine)


def _rates_by(
    class_of: Callable[[Plan, ModelShape, str, str], str], plan: Plan, shape: ModelShape, machine: Machine
) -> StrategyRates:
    def of(part: str) -> PassRates:
        kinds = ("linear", "head", "attention", "grouped_linear")
        classes = [class_of(plan, shape, part, kind) for kind in kinds]
        rates = [machine.rates[name] for name in classes]
        if plan.weights.group != INTEGER_GROUP:
            return PassRates(*rates, *rates[:2])
        integers = (machine.rates.get(integer_kind(name), machine.rates[name]) for name in classes[:2])
        return PassRates(*rates, *integers)

    return StrategyRates(target=of("target"), draft=of("draft"))


def kernel_class(plan: Plan, shape: ModelShape, part: str, kind: str) -> str:
    """The calibrated class of an operation's kind in one part of the work: "prefill", "draft" or "target"."""
    chosen = _chosen_class(plan, shape, part) if kind == "attention" else None
    return chosen or _dense_class(plan, shape, part, kind)


def class_of_op(plan: Plan, shape: ModelShape, part: str, op: Op) -> str:
    """The calibrated class of an operation, such as full precision where a sliding window hides tokens."""
    executed = shape.architecture in executable_architectures()
    if op.name == WINDOWED_ATTENTION and executed and hides(shape.window_tokens or 0, plan.workload.final_context):
        return attention_kind(0, shape.head_dim)
    return kernel_class(plan, shape, part, op.kind)


def selection_classes(plan: Plan, shape: ModelShape, part: str) -> Iterator[str]:
    """The kernel classes of token selection in one part of the work, without the attention to the selected tokens.

    Drafts scan 2-bit keys inside their attention kernel, so the scan is no class of its own there.
    """
    if _chosen_class(plan, shape, part) is None:
        return
    selection = (plan.speculation if part == "draft" else plan.attention).selection
    cost = selection.cost()
    if cost.scores_per_token:
        yield "top_k"
    if selection.needs_codes and part == "target":
        yield scan_kind("two_bit_scan", shape.q_heads, shape.kv_heads, shape.head_dim)
    if cost.scored_keys:
        yield "key_scan"


def used_classes(plan: Plan, shape: ModelShape) -> list[str]:
    """The kernel classes of linear layers, attention, states and selection whose rates a plan's times rest on."""
    parts = ("target", "draft") if plan.speculation.self_drafts else ("target",)
    kinds = ["linear", *(["attention_mla"] if shape.is_mla else ["attention"] if shape.kv_layers else [])]
    kinds += [*(["grouped_linear"] if shape.is_moe else []), *(["state"] if shape.states else [])]
    classes = [kernel_class(plan, shape, part, kind) for part in parts for kind in kinds]
    return [*classes, *(kind for part in parts for kind in selection_classes(plan, shape, part))]


def _chosen_class(plan: Plan, shape: ModelShape, part: str) -> str | None:
    """The class of attention to selected tokens; None if all tokens are read."""
    if part == "draft":
        if not plan.speculation.sparse:
            return None
        fused_class = plan.speculation.selection.attention_class
        listed = sparse_attention_kind(draft_code_bits(plan), shape.head_dim)
        heads = shape.q_heads, shape.kv_heads, shape.head_dim
        return scan_kind(fused_class, *heads) if fused_class else listed
    return sparse_attention_kind(target_code_bits(plan), shape.head_dim) if plan.attention.active else None


def expert_bits(plan: Plan, shape: ModelShape, *, drafting: bool = False) -> int:
    """Bits of the experts' weights that a plan's target or drafts read: those of MXFP4 stay as they are stored."""
    if shape.weight_bits.format == KEPT_FORMAT:
        return 4
    return plan.weights.draft_bits if drafting else plan.weights.target_bits


def _prompt_experts(plan: Plan, shape: ModelShape, device: Device) -> dict[str, float]:
    """The terms of prompts' routed experts."""
    kept, bits = shape.weight_bits.format == KEPT_FORMAT, plan.weights.target_bits
    terms: dict[str, float] = {"experts_share": PROMPT_MXFP4_SHARE if kept else PROMPT_EXPERTS_SHARE[bits]}
    if device.grouped_experts and shape.is_moe:
        rows, extra = GROUPED_ROWS, GROUPED_EXTRA_ROWS[bits]
        if kept:
            rows, extra = GROUPED_MXFP4_ROWS, GROUPED_MXFP4_EXTRA_ROWS
        terms |= {"grouped_experts": 1, "grouped_rows": rows, "expert_extra_rows": extra}
        terms["copies_experts"] = int(kept or bits < FULL_BITS)
    return terms


def _dense_class(plan: Plan, shape: ModelShape, part: str, kind: str) -> str:
    drafting = part == "draft"
    if (
        _head_in_blocks(plan, shape)
        if kind == "head"
        else plan.weights.stored and kind == "linear" and part != "prefill"
    ):
        return STORED_LINEAR
    if kind == "head":
        bits = draft_head_bits(plan) if drafting else target_head_bits(plan)
        return "head" if bits == 16 else linear_kind(bits)
    if kind == "linear":
        bits = plan.weights.draft_bits if drafting else plan.weights.target_bits
        return "prefill_linear" if part == "prefill" else linear_kind(bits)
    if kind == "grouped_linear" and part != "prefill":
        return experts_kind(expert_bits(plan, shape, drafting=drafting))
    if kind == "prefill_attention":
        return prefill_attention_kind(shape.head_dim)
    if kind == "attention":
        return attention_kind(draft_code_bits(plan) if drafting else target_code_bits(plan), shape.head_dim)
    return kind


def target_head_bits(plan: Plan) -> int:
    """Bits of the target's output head: 8 with 8-bit weights. With 4-bit weights it stays in full precision."""
    return 8 if plan.weights.target_bits == 8 else 16


def draft_head_bits(plan: Plan) -> int:
    """Bits of the drafts' output head: those of the draft weights, or of the target's head if they share weights."""
    return plan.weights.draft_bits if plan.weights.draft_differs else target_head_bits(plan)


def target_code_bits(plan: Plan) -> int:
    """Bits of the codes the target reads; 0 where it reads full precision."""
    return 8 if plan.kv.target_bits == 8 else 0


def draft_code_bits(plan: Plan) -> int:
    """Bits of the codes drafts read: 4 with upper codes, else the same as the target."""
    return 4 if plan.speculation.codes is DraftCodes.UPPER else target_code_bits(plan)


def stack(items: Sequence[Any], counts: Sequence[int]) -> Any:
    """Stacks (nested) dataclasses of numbers into one dataclass of arrays, repeating item i counts[i] times.

    A field that is equal in all items stays a number, which is cheaper than an array.
    """
    return _stacked(items, np.repeat(np.arange(len(items)), counts))


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Applies `change` to every number and array in nested dataclasses and tuples."""
    if isinstance(values, tuple):
        return tuple(mapped(change, value) for value in values)
    if is_dataclass(values) and not isinstance(values, type):
        return type(values)(**{f.name: mapped(change, getattr(values, f.name)) for f in fields(values)})
    return change(values)


def reshaped(values: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes every array in nested dataclasses and tuples; numbers stay."""
    return mapped(lambda value: value.reshape(shape) if isinstance(value, np.ndarray) else value, values)


def _stacked(items: Sequence[Any], index: np.ndarray) -> Any:
    """The items stacked in the order of `index`; a value that is equal in all items stays scalar."""
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
    """Costs of plain decoding and of the plan's rounds, or at `gammas`, averaged over the workload's generation."""
    kinds = sorted({0, *gammas}) if gammas else list(dict.fromkeys((0, *plan.speculation.round_kinds)))
    model = AcceptanceModel.of_profile(shape, plan.workload.context, profile)
    estimate = estimate_kinds(plan, shape, Machine.of(profile), model, kinds)
    seconds = np.broadcast_to(estimate.round.total_s, (len(kinds),)).tolist()
    drafter = plan.speculation.drafter
    known = proposal_acceptance(drafter.kind, plan.workload) if drafter.active else None
    of_proposals = (known.hit, known.at(drafter.depth)[1], not drafter.trained) if known else ()
    return RoundCosts(dict(zip(kinds, seconds, strict=True)), model.of(plan).best, *of_proposals)


def estimate_kinds(
    plan: Plan, shape: ModelShape, machine: Machine, model: AcceptanceModel, kinds: Sequence[RoundKind], **terms: Any
) -> Estimate:
    """Estimates of the plan with every kind of round, each with the acceptance that `model` predicts for it.

    terms: of the strategy, instead of the plan's: arrays whose last axis, for the kinds, is 1.
    """
    gamma = np.array([round_shape(kind).gamma for kind in kinds])
    acceptance = model.best(plan, gamma, np.full(len(gamma), plan.speculation.ratio))
    strategy = with_kinds(strategy_of(plan, shape, machine, 1.0).with_terms(acceptance=acceptance, **terms), kinds)
    return evaluate(shape, machine, strategy, rates_of(plan, shape, machine))


def with_kinds(strategy: Strategy, kinds: Sequence[RoundKind]) -> Strategy:
    """The strategy with every kind of round. Its acceptance is of self-drafts; proposals to the target have theirs."""
    gamma, passes, depth = np.array([round_shape(kind) for kind in kinds]).T
    if not np.any(depth):
        return replace(strategy, gamma=gamma, proposals=0, cascade_passes=0)
    acceptance = np.where((depth > 0) & (passes == 0), strategy.proposal_acceptance, strategy.acceptance)
    tiers = {"proposals": depth, "cascade_passes": passes * (depth > 0)}
    return replace(strategy, gamma=gamma, acceptance=acceptance, **tiers)


def steady_kind(plan: Plan, shape: ModelShape, machine: Machine, model: AcceptanceModel) -> RoundKind:
    """The round at which an adaptive plan settles if acceptance is as predicted; the plan's if it is fixed."""
    kinds = plan.speculation.round_kinds
    if len(kinds) == 1:
        return kinds[0]
    return kinds[int(np.argmin(estimate_kinds(plan, shape, machine, model, kinds).tpot_s))]


def adaptation(
    plan: Plan, shape: ModelShape, machine: Machine, model: AcceptanceModel, kind: RoundKind, batches: np.ndarray
) -> np.ndarray:
    """How many times the tokens of rounds of a kind at the known acceptance rounds that adapt yield: [batches].

    A fixed plan takes the mean of its kind of text. Rounds that adapt settle on each text at the kind that is fastest
    there, and the mean of that is less; until they have, they lose what the budget of losses allows. 1 for plans whose
    rounds do not adapt to a lookup's proposals. Self-drafts' acceptance varies by 0.1 in log odds
    (study_drafters_*.json), which changes no expected time by more than 0.1%.
    """
    drafter, kinds = plan.speculation.drafter, plan.speculation.round_kinds
    if not plan.speculation.adapts_to_text:
        return np.ones(len(batches))
    known = proposal_acceptance(drafter.kind, plan.workload)
    hit, accepted, weight = np.stack([texts_of(known, drafter.depth, int(each)) for each in batches], axis=1)[..., None]
    terms = {"batch": batches[:, None, None], "hit": hit, "proposal_acceptance": accepted}
    each = estimate_kinds(plan, shape, machine, model, kinds, **terms)  # [batches, texts, kinds], plain decoding first
    seconds = (each.round.total_s - each.round.flush_s) / each.tokens_per_round  # a token takes as much of a flush
    expected_s = (weight * seconds).min(axis=2).sum(axis=1) + RUNNING_LOSS * seconds[:, 0, 0]
    return np.asarray(seconds[:, -1, kinds.index(kind)] / expected_s)
