"""Maps a plan onto an engine, axis by axis: the engine's equivalent, or the nearest that it offers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeplan.planner.acceptance import Acceptance
from ridgeplan.planner.acceptance.drafter_rows import EAGLE3, MTP
from ridgeplan.planner.acceptance.drafters import (
    ContextDecay,
    ProposalAcceptance,
    as_published,
    at_context,
    proposal_acceptance,
)
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.export.drafts import BLOCKS, HEADS, LOOKUPS, MIN_GAIN, DraftModel, EngineRounds, ranges
from ridgeplan.planner.export.options import ServeCommandOptions, Served
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.planner.queries.drafter_range import last_context, last_win
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.sharding import shard
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.engine import EAGLE3_MEASURED, EAGLE3_PASS_MS
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.plan.plan import DraftCodes, Drafter, DrafterKind, KVFormat, Workload, require

MAX_OFFLOAD_SHARE = 0.9  # of the weights; the rest is embeddings, norms and what engines never offload
UNQUANTIZED = ("bf16", "float32")


@dataclass(frozen=True)
class Carried:
    """One axis of the plan beside what the engine does there. exact: whether both compute the same."""

    axis: str
    plan: str
    engine: str
    exact: bool


def served(options: ServeCommandOptions) -> tuple[Served, tuple[Carried, ...]]:
    """What the engine runs for the plan, and how it carries each axis.

    Drafts are left out if they do not fit beside the target or make it no faster. Raises PlanError for a model that
    does not fit, even with most of its weights on the host if the plan offloads.
    """
    kv = options.kv_cache_dtype or options.engine.kv_dtypes.get(options.plan.kv.format, "auto")
    bits = options.plan.weights.target_bits
    # A quantized checkpoint stays as it is: engines refuse to quantize it again.
    quantization = "" if bits == 16 or is_quantized(options.shape) else options.engine.weights[bits]
    plain = Served(options, kv=kv, quantization=quantization)
    placed = replace(plain, offload_gib=plain.missing_gib)
    _require_fits(placed)
    drafts, draft_axes = _drafts(placed)
    parallel = options.plan.parallel
    divided = () if parallel == SINGLE else (Carried("parallelism", str(parallel), str(parallel), True),)
    axes = (*divided, *_target_axes(placed), *draft_axes)
    return replace(placed, drafts=drafts), axes


def is_quantized(shape: ModelShape) -> bool:
    """Whether the checkpoint is quantized already."""
    return shape.weight_bits.format not in UNQUANTIZED


def _target_axes(placed: Served) -> Iterator[Carried]:
    """How the engine carries everything but the drafts; axes that the plan leaves at their defaults may be missing."""
    options, plan = placed.options, placed.options.plan
    workload, eviction, attention = plan.workload, plan.eviction, plan.attention
    if workload.final_context > options.max_model_len:
        length = f"{tokens_text(workload.context)} tokens of context and {tokens_text(workload.new_tokens)} new ones"
        stops = (
            f"{tokens_text(options.max_model_len)} together, the model's limit; --yarn of `ridgeplan plan` stretches it"
        )
        yield Carried("length", length, stops, False)
    yield _weights(placed)
    yield _cache(placed)
    if eviction.active:
        kept = f"{eviction.tokens(workload.context)} tokens kept"
        kept += f", in chunks of {eviction.chunk}" if eviction.chunk else ""
        yield Carried("eviction", f"{eviction.policy}, {kept}", "none: every token stays and is read", False)
    if plan.placement.offload:
        option = f"{options.engine.cpu_offload} {placed.offload_gib}: weights on the host, read every step"
        engine = option if placed.offload_gib else "all on the GPU, where it fits"
        yield Carried("placement", "KV of layers on the host, where it does not fit", engine, not placed.offload_gib)
    if attention.active:
        read = f"{attention.selection.name}, {attention.budget} tokens a step"
        yield Carried("attention", read, "full attention", False)


def _weights(placed: Served) -> Carried:
    options = placed.options
    bits, held = options.plan.weights.target_bits, options.shape.weight_bits.format
    if not placed.quantization:
        checkpoint = f"the {held} checkpoint"
        return Carried("weights", checkpoint if bits == 16 else f"{bits} bits", checkpoint, bits == 16)
    nearest = f"{placed.quantization}, 8 bits"
    if bits == 4:
        nearest += "; engines make no INT4 of a checkpoint: name a 4-bit one (AWQ, GPTQ) with --model"
    return Carried("weights", f"{bits} bits, groups of {options.plan.weights.group}", nearest, False)


def _cache(placed: Served) -> Carried:
    kv, options = placed.options.plan.kv, placed.options
    names = {
        KVFormat.FULL: "the model's own type",
        KVFormat.SHADOW: "bf16, with INT4 codes for drafts",
        KVFormat.INT8: "INT8",
        KVFormat.HIERARCHICAL: "INT4 + INT4 codes, 8 bits for the target",
    }
    exact = placed.kv == "auto" and kv.format in (KVFormat.FULL, KVFormat.SHADOW)
    chosen = placed.kv if options.kv_cache_dtype is None else f"{placed.kv}, as asked"
    return Carried("KV cache", names[kv.format], "the model's own type" if placed.kv == "auto" else chosen, exact)


def _require_fits(placed: Served) -> None:
    """Raises PlanError if more must be offloaded than the plan allows or than the weights could free."""
    options, workload = placed.options, placed.options.plan.workload
    weights_gib = float(placed.memory.weights) / GIB
    divided = "" if options.plan.parallel == SINGLE else f" on each of {options.plan.parallel.gpus} GPUs"
    max_offload_gib = MAX_OFFLOAD_SHARE * weights_gib if options.plan.placement.offload else 0
    require(
        placed.offload_gib <= max_offload_gib,
        f"{options.engine.title} needs {placed.needed_bytes / GIB:.1f} GiB for weights, activations and KV of batch "
        f"{workload.batch} with {options.max_model_len} tokens each{divided}, of {placed.usable_bytes / GIB:.1f} GiB; "
        "allowed: a plan with less KV or with offloading, --kv-cache-dtype fp8, or more GPUs",
    )


def _drafts(placed: Served) -> tuple[DraftModel | None, tuple[Carried, ...]]:
    """The engine's counterpart of the plan's drafts; None, with the reason in the axis, if it has none."""
    options = placed.options
    if not options.plan.speculation.active:
        named = options.draft_method != "draft_model" or options.draft_model is not None
        require(not named, "the plan has no drafts; allowed: neither --draft-method nor --draft-model")
        return None, ()
    requested = _drafting(placed)
    shortfall_gib = replace(placed, drafts=requested).missing_gib - placed.offload_gib
    problem = f"a second model and its cache lack {shortfall_gib} GiB" if shortfall_gib > 0 else None
    drafts = requested if problem else _where_they_pay(placed, _at_best_gammas(placed, requested))
    if not drafts.gamma:
        problem = f"{options.engine.title} would be slower with them{_ends(placed, requested)}"
    elif not problem and drafts.method == "draft_model" and (gain := _gain(placed, drafts)) < MIN_GAIN:
        problem = f"{options.engine.title} would be only {gain:.1%} faster with them"
    if problem:
        return None, (Carried("drafts", _draft_text(options), f"none: {problem}", False),)
    model = f"{drafts.model} once more in {drafts.quantization}" if drafts.quantization else drafts.model
    model = model or "the model's own layers"
    nearest = f"{drafts.method}: {model}, gamma {drafts.gamma}, with a KV cache of its own that it reads whole"
    if drafts.method in LOOKUPS:
        match = f"{drafts.gamma} tokens after a match of {drafts.min_match} or more"
        nearest = f"{drafts.method}: up to {match}; not priced: the lookup"
        if (drafts.method, options.engine.name) == ("suffix", "vllm"):
            nearest += "; needs the package arctic-inference beside vLLM"
    nearest += _ends(placed, drafts)
    return drafts, (Carried("drafts", _draft_text(options), nearest, False),)


def _gain(placed: Served, drafts: DraftModel) -> float:
    """How much faster drafts make the batch at which they help most, relatively; infinite where that is not known."""
    rounds = rounds_of(placed, drafts)
    if rounds is None:
        return math.inf
    batches = range(1, placed.options.plan.workload.rank_batch + 1)
    return max(float(rounds.tpot_s(batch, 0) / rounds.tpot_s(batch, drafts.gamma_at(batch))) - 1 for batch in batches)


def _ends(placed: Served, drafts: DraftModel) -> str:
    """From which context on an EAGLE-3 head loses, and whether the engine then stops it; "" where it is not known."""
    rounds, title = rounds_of(placed, drafts), placed.options.engine.title
    if drafts.method != "eagle3":
        return ""
    stops = f"; its configuration allows {drafts.limit} tokens" if drafts.limit else ""
    if drafts.longest:
        refuses = "" if drafts.limit else f", and {title} refuses more than the head's own limit"
        stops = f"; max_model_len stops it beyond {drafts.longest} tokens{refuses}{stops}"
    if rounds is None:
        return stops
    workload, gamma = placed.options.plan.workload, drafts.gamma
    batch, end = workload.rank_batch, _end(placed, drafts, rounds)
    tokens = pass_tokens(1.0, drafts.acceptance(gamma), gamma)
    steps = float(rounds.tpot_s(batch, gamma) * tokens / rounds.tpot_s(batch, 0))
    loses = "" if end is None else f", and loses from about {end} tokens of context on"
    if end is not None and end < placed.options.max_model_len and not _stops_heads(placed):
        stops = f"; {title} has no switch for that{stops}"
    known = proposal_acceptance(DrafterKind.HEAD, replace(workload, acceptance_length=0.0))
    source = known.where if known.known else str(ContextDecay.of(EAGLE3))
    return f"; a pass takes {steps:.2f} plain steps{loses}{stops} ({source})"


def _stops_heads(placed: Served) -> bool:
    """Whether the engine stops drafts at a length.

    vLLM drafts nothing in steps whose longest sequence is beyond the draft's max_model_len (`_input_fits_in_drafter` of
    its model runner), and refuses one beyond the head's own (`SpeculativeConfig._maybe_override_draft_max_model_len`).
    """
    options = placed.options
    return options.engine.name == "vllm" and options.schema.has_field("--speculative-config", "max_model_len")


def _end(placed: Served, drafts: DraftModel, rounds: EngineRounds) -> int | None:
    """The context from which on an EAGLE-3 head loses at its acceptance there; None if it always wins."""
    workload = placed.options.plan.workload

    def wins(context: int) -> bool:
        accepted = _head_acceptance(at_context(workload, context, Drafter(DrafterKind.HEAD, 1)))
        target = replace(rounds.target, context=float(context))
        here = replace(rounds, target=target, drafts=replace(drafts, accepted=accepted))
        return bool(here.tpot_s(workload.rank_batch, drafts.gamma) < here.tpot_s(workload.rank_batch, 0))

    return last_win(wins, last_context(workload, placed.options.shape))


def _where_they_pay(placed: Served, drafts: DraftModel) -> DraftModel:
    """The drafts with the longest sequence for which an EAGLE-3 head pays and is made, where the engine stops it."""
    rounds = rounds_of(placed, drafts)
    if drafts.method != "eagle3" or not drafts.gamma or not _stops_heads(placed):
        return drafts
    end = _end(placed, drafts, rounds) if rounds is not None else None
    longest = min(end if end is not None else math.inf, drafts.limit or math.inf)
    if longest >= placed.options.max_model_len:
        return drafts
    return replace(drafts, longest=int(longest), gamma=drafts.gamma * (longest > 0))


def _head_acceptance(workload: Workload) -> ProposalAcceptance:
    """Acceptance of an EAGLE-3 head over a generation: the user's figure or rows, else as published."""
    known = proposal_acceptance(DrafterKind.HEAD, workload)
    return known if known.known else as_published(EAGLE3, workload)


def _measured(workload: Workload) -> bool:
    """Whether the user measured a head."""
    figure = workload.acceptance_length and workload.drafter is DrafterKind.HEAD
    named = workload.drafter_head or workload.drafter_rows
    return bool(figure or (named and proposal_acceptance(DrafterKind.HEAD, workload).known))


def _lookup(placed: Served) -> DraftModel:
    """Suffix lookup, which the plan's drafter is, or feeds self-drafts that engines lack."""
    drafter, workload = placed.options.plan.speculation.drafter, placed.options.plan.workload
    known = proposal_acceptance(DrafterKind.SUFFIX, workload)
    method = "suffix" if placed.options.draft_method == "suffix" else "ngram"
    return DraftModel(
        model="", method=method, quantization="", kv=placed.kv, gamma=drafter.depth, accepted=known,
        shape=None, hit=known.hit, min_match=drafter.min_match, deepest=known.depth,
    )  # fmt: skip


def _require_named(options: ServeCommandOptions) -> None:
    """Raises PlanError for a method that the plan's drafter does not allow, or one whose draft model is not named."""
    method, named, kind = options.draft_method, options.draft_model, options.plan.speculation.drafter.kind
    if method in LOOKUPS:
        require(kind is DrafterKind.SUFFIX, f"the plan's drafter is {kind}; allowed with {method}: suffix")
        require(named is None, f"draft model is {named}; allowed with {method}: none, as it looks the text up")
    if kind is DrafterKind.BLOCK:
        allowed = f"--draft-method {' or '.join(BLOCKS)}, with --draft-model"
        require(method in BLOCKS, f"the plan's drafter proposes blocks; allowed: {allowed}")
    require(
        named is not None or method == "mtp" or (kind is not DrafterKind.HEAD and method not in HEADS),
        "no head or block drafter is named; allowed: --draft-model with its id or path, or --draft-method mtp for "
        "layers of the model's own",
    )


def _drafting(placed: Served) -> DraftModel:
    _require_named(placed.options)
    options, draft_model = placed.options, placed.options.draft_model
    workload, method, own_layers = options.plan.workload, options.draft_method, options.draft_method == "mtp"
    by_suffix = options.plan.speculation.drafter.kind is DrafterKind.SUFFIX and method == "draft_model"
    if method in LOOKUPS or (by_suffix and draft_model is None):
        return _lookup(placed)
    accepted: Acceptance | ProposalAcceptance = options.acceptance
    deepest = limit = 0
    if method in HEADS:
        known = _head_acceptance(workload)
        if own_layers and not _measured(workload):
            known = as_published(MTP, workload)
        accepted, deepest = known, min(known.depth, max(EAGLE3_PASS_MS)[0])
        folder = workload.drafter_head
        limit = head_settings(folder).max_context if folder and draft_model == folder else 0
    shadow = options.plan.kv.format is KVFormat.SHADOW
    other_dtype = options.schema.has_field("--speculative-config", "kv_cache_dtype")
    return DraftModel(
        model=draft_model or ("" if own_layers else options.model),
        method=method,
        quantization="" if draft_model or own_layers or is_quantized(options.shape) else options.engine.weights[8],
        kv=options.engine.kv_dtypes[KVFormat.INT8] if shadow and other_dtype else placed.kv,
        gamma=options.plan.speculation.gamma,
        accepted=accepted,
        shape=options.draft_shape if draft_model or own_layers else options.shape,
        deepest=deepest,
        limit=limit,
    )


def _at_best_gammas(placed: Served, drafts: DraftModel) -> DraftModel:
    """The drafts at their best gamma, by batch if the engine can.

    Without predicted times the plan's gamma stays, and that of a head whose acceptance the user has not measured.
    """
    rounds, workload = rounds_of(placed, drafts), placed.options.plan.workload
    if rounds is None or (drafts.method == "eagle3" and not _measured(workload)):
        return drafts
    gammas = rounds.best_gammas(placed.options.plan.workload.rank_batch)
    if not placed.options.engine.schedules_gamma:
        return replace(drafts, gamma=gammas[-1])
    return replace(drafts, gamma=max(gammas), schedule=tuple(ranges(gammas)))


def rounds_of(placed: Served, drafts: DraftModel) -> EngineRounds | None:
    """Times of rounds with these drafts; None if they cannot be predicted, for an unknown draft model."""
    options = placed.options
    known = {
        "draft_model": drafts.shape is not None,
        **dict.fromkeys(LOOKUPS, True),
        **dict.fromkeys(("mtp", *BLOCKS), False),
        "eagle3": (options.sharded.hidden, options.hardware.name, options.plan.parallel.gpus) == EAGLE3_MEASURED,
    }
    if not known[drafts.method]:
        return None
    sharded = replace(drafts, shape=drafts.shape and shard(drafts.shape, options.plan.parallel))
    return EngineRounds(options.speed, options.sharded, options.hardware, placed.step(), placed.host_s, sharded)


def _draft_text(options: ServeCommandOptions) -> str:
    """The plan's drafts in a few words."""
    speculation, weights = options.plan.speculation, options.plan.weights
    drafter = speculation.drafter
    proposed = f"{drafter.depth} tokens by {drafter.kind}" if drafter.active else ""
    if not speculation.self_drafts:
        return proposed
    codes = "upper codes" if speculation.codes is DraftCodes.UPPER else "the target's KV"
    read = f"{speculation.selection.name} of {codes}" if speculation.sparse else codes
    bits = f", {weights.draft_bits}-bit weights" if weights.draft_differs else ""
    adaptive = "adaptive up to " if speculation.adaptive else ""
    below = f", which verify {proposed}" if proposed else ""
    return f"gamma {adaptive}{speculation.gamma} on {read}{bits}{below}"
