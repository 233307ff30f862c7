"""Maps a plan onto an engine, axis by axis: the engine's equivalent, or the nearest that it offers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeplan.planner.acceptance.drafters import EAGLE3, ContextDecay, proposal_acceptance
from ridgeplan.planner.export.drafts import EAGLE3_GPU, EAGLE3_HIDDEN, LOOKUP, DraftModel, EngineRounds, ranges
from ridgeplan.planner.export.options import ServeCommandOptions, Served
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.sharding import shard
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.plan.plan import DraftCodes, DrafterKind, KVFormat, require

MAX_OFFLOAD_SHARE = 0.9  # of the weights; the rest is embeddings, norms and what engines never offload
MIN_GAIN = 0.03  # over plain decoding, for which a second copy of the model is worth its memory
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
        length = f"{workload.context} tokens of context and {workload.new_tokens} new ones"
        stops = f"{options.max_model_len} together, the model's limit; --yarn of `ridgeplan plan` stretches it"
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
        return None, ()
    requested = _drafting(placed)
    shortfall_gib = replace(placed, drafts=requested).missing_gib - placed.offload_gib
    problem = f"a second model and its cache lack {shortfall_gib} GiB" if shortfall_gib > 0 else None
    drafts = requested if problem else _at_best_gammas(placed, requested)
    if not drafts.gamma:
        problem = f"{options.engine.title} would be slower with them{_ends(placed, requested)}"
    elif not problem and drafts.method == "draft_model" and (gain := _gain(placed, drafts)) < MIN_GAIN:
        problem = f"{options.engine.title} would be only {gain:.1%} faster with them"
    if problem:
        return None, (Carried("drafts", _draft_text(options), f"none: {problem}", False),)
    model = f"{drafts.model} once more in {drafts.quantization}" if drafts.quantization else drafts.model
    nearest = f"{drafts.method}: {model}, gamma {drafts.gamma}, with a KV cache of its own that it reads whole"
    if drafts.method == LOOKUP:
        nearest = (
            f"{LOOKUP}: up to {drafts.gamma} tokens after a match of {drafts.min_match} or more; not priced: the lookup"
        )
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
    """From which context on an EAGLE-3 head loses, by published tokens of a pass; "" where that is not known."""
    rounds = rounds_of(placed, drafts)
    if rounds is None or drafts.method != "eagle3":
        return ""
    batch, gamma, published = placed.options.plan.workload.rank_batch, drafts.gamma, ContextDecay.of(EAGLE3)
    end = rounds.loses_from(batch, gamma, published.tokens)
    steps = float(rounds.tpot_s(batch, gamma) * pass_tokens(1.0, drafts.acceptance, gamma) / rounds.tpot_s(batch, 0))
    loses = "" if end is None else f", and loses from about {end} tokens of context on"
    return f"; a pass takes {steps:.2f} plain steps{loses} ({published})"


def _lookup(placed: Served) -> DraftModel:
    """Suffix lookup, which the plan's drafter is, or feeds self-drafts that engines lack."""
    drafter, workload = placed.options.plan.speculation.drafter, placed.options.plan.workload
    known = proposal_acceptance(DrafterKind.SUFFIX, workload)
    return DraftModel(
        model="", method=LOOKUP, quantization="", kv=placed.kv, gamma=drafter.depth, acceptance=known.best, shape=None,
        hit=known.hit, min_match=drafter.min_match,
    )  # fmt: skip


def _drafting(placed: Served) -> DraftModel:
    options, draft_model = placed.options, placed.options.draft_model
    if options.plan.speculation.drafter.kind is DrafterKind.SUFFIX and draft_model is None:
        return _lookup(placed)
    acceptance, workload = options.acceptance, options.plan.workload
    if options.draft_method == "eagle3":
        known = proposal_acceptance(DrafterKind.HEAD, workload)
        measured = workload.acceptance_length or workload.drafter_head
        acceptance = known.best if measured else ContextDecay.of(EAGLE3).acceptance(workload.context)
    shadow = options.plan.kv.format is KVFormat.SHADOW
    other_dtype = options.schema.has_field("--speculative-config", "kv_cache_dtype")
    return DraftModel(
        model=draft_model or options.model,
        method=options.draft_method,
        quantization="" if draft_model or is_quantized(options.shape) else options.engine.weights[8],
        kv=options.engine.kv_dtypes[KVFormat.INT8] if shadow and other_dtype else placed.kv,
        gamma=options.plan.speculation.gamma,
        acceptance=acceptance,
        shape=options.draft_shape if draft_model else options.shape,
    )


def _at_best_gammas(placed: Served, drafts: DraftModel) -> DraftModel:
    """The drafts at their best gamma, by batch if the engine can.

    Without predicted times the plan's gamma stays, and that of a head whose acceptance the user has not measured.
    """
    rounds, workload = rounds_of(placed, drafts), placed.options.plan.workload
    if rounds is None or (drafts.method == "eagle3" and not workload.acceptance_length):
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
        LOOKUP: True,
        "eagle3": options.sharded.hidden == EAGLE3_HIDDEN
        and options.hardware.name == EAGLE3_GPU
        and options.plan.parallel == SINGLE,
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
