"""What the runtime can execute today: the planner recommends nothing else, and the runtime refuses it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ridgeplan.roofline.catalog.families import executable_architectures, executed_instead, families
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.layers import DELTA_RULE, LayerGroup
from ridgeplan.roofline.catalog.model_shape import LOADED_FORMATS, ModelShape, StoredBits, loaded_formats
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.engine import EAGLE3_MEASURED
from ridgeplan.roofline.execution import TILE_OUTPUTS, padded_head_dim, uses_draft_swap
from ridgeplan.roofline.plan.plan import DraftCodes, DrafterKind, KVFormat, Plan
from ridgeplan.roofline.plan.policies.evictions import layer_budgets
from ridgeplan.roofline.plan.policy import EVICTIONS, SparseSelection

SHIPPED_HEADS = ("HuggingFaceTB/SmolLM2-135M",)  # models whose retrieval head comes with the package
MAX_PLUGIN_QUERIES = 16  # of a sequence in one call of decode attention
SPARSE_CLASS = "sparse_attention"  # calibrated with all others that sparse drafts need


class Backend(StrEnum):
    """The engine that executes a plan: this package or another. ANY admits plans that no engine runs yet."""

    ANY = "any"
    RIDGEPLAN = "ridgeplan"
    VLLM = "vllm"
    VLLM_PLUGIN = "vllm+plugin"  # vLLM with ridgeplan.runtime.vllm, which brings this package's kernels
    SGLANG = "sglang"


STORED_WEIGHTS = "weights as a GGUF file stores them"
ENGINE_FORMATS = (KVFormat.FULL, KVFormat.INT8)  # caches that other engines have a counterpart of: fp8 for INT8


def unsupported(plan: Plan, backend: Backend, shape: ModelShape, profile: Profile) -> str | None:
    """What the backend lacks to execute the plan, or the profile to predict it; None if nothing."""
    if backend is Backend.ANY:
        return None
    if backend is Backend.RIDGEPLAN:
        return only_estimated(plan, shape) or uncalibrated(plan, profile)
    if backend is Backend.VLLM_PLUGIN:
        return not_carried(plan, shape) or uncalibrated(plan, profile)
    missing = _missing_in(plan, backend, shape)
    if len(missing) == 1 and plan.speculation.drafter.kind is DrafterKind.BLOCK:
        return f"estimated only: passes of {backend} with a block drafter were not measured"
    return f"{backend} has no {', '.join(missing)}" if missing else None


PLUGIN_GROUP, PLUGIN_HEAD_DIMS = 128, (64, 128)  # tokens of a page, and sizes of heads that its cache has


def not_carried(plan: Plan, shape: ModelShape) -> str | None:
    """What of a plan, or of its model, vLLM's plugin does not carry (docs/vllm.md); None if nothing."""
    weights, kv, speculation = plan.weights, plan.kv, plan.speculation
    coded, drafts = kv.format in (KVFormat.INT8, KVFormat.HIERARCHICAL), speculation.active
    held = shape.weight_bits
    checks = {
        f"{weights.target_bits}-bit weights made of a checkpoint in {held.format}": weights.target_bits < 16
        and not held.full,
        STORED_WEIGHTS: weights.stored,
        "second copy of the weights for drafts": drafts and weights.draft_copy,
        f"{kv.format.value} KV": kv.format is KVFormat.SHADOW,
        f"KV in groups of {kv.group}": coded and kv.group != PLUGIN_GROUP,
        f"KV of heads of {shape.head_dim} channels": coded and shape.head_dim not in PLUGIN_HEAD_DIMS,
        "KV with attention sinks or soft caps": coded
        and not {"attention sinks", "attention soft cap"}.isdisjoint(shape.traits),
        "KV of a sliding window": coded and shape.window_tokens is not None,
        "latent attention": shape.is_mla,
        "recurrent states": bool(shape.states),
        "experts": shape.is_moe,
        f"eviction {plan.eviction.policy!r}": plan.eviction.active,
        "KV on the host": plan.placement.offload,
        f"target selection {plan.attention.selection.name!r}": plan.attention.active,
        f"drafts on tokens chosen by {speculation.selection.name}": drafts and speculation.sparse,
        f"{speculation.drafter.kind} drafter": drafts and speculation.drafter.active,
        "adaptive gamma": drafts and speculation.adaptive,
        "drafts that do not read upper codes": drafts and not (coded and speculation.codes is DraftCodes.UPPER),
        "drafts over pipeline stages or replicas": drafts and plan.parallel.pipeline * plan.parallel.data > 1,
        f"weights whose shards on {plan.parallel.tensor} GPUs split groups of {weights.group}": weights.target_bits < 16
        and plan.parallel.tensor > 1
        and any(width % (weights.group * plan.parallel.tensor) for width in (shape.q_width, shape.intermediate)),
        f"gamma {speculation.gamma}": drafts and speculation.gamma >= MAX_PLUGIN_QUERIES,
    }
    missing = [name for name, applies in checks.items() if applies]
    return f"{Backend.VLLM_PLUGIN} carries no {', no '.join(missing)}" if missing else None


def _missing_in(plan: Plan, engine: Backend, shape: ModelShape) -> list[str]:
    """The plan's values that another engine does not support, one phrase each."""
    bits, held = plan.weights.target_bits, shape.weight_bits
    checks = {
        f"{bits}-bit weights made of a checkpoint in {held.format}": bits == 4 or (bits == 8 and not held.full),
        STORED_WEIGHTS: plan.weights.stored,
        f"eviction {plan.eviction.policy!r}": plan.eviction.active,
        "offload of a running sequence's KV": plan.placement.offload,
        f"target selection {plan.attention.selection.name!r}": plan.attention.active,
        "self-speculation that shares its cache": plan.speculation.self_drafts,
        **_missing_drafter(plan, engine, shape),
        f"{plan.kv.format.value} KV": plan.kv.format not in ENGINE_FORMATS,
    }
    return [name for name, missing in checks.items() if missing]


def _missing_drafter(plan: Plan, engine: Backend, shape: ModelShape) -> dict[str, bool]:
    """What another engine lacks for a plan's drafter: passes that were measured, above all."""
    drafter = plan.speculation.drafter
    measured = (shape.hidden, plan.workload.hardware, plan.parallel.gpus) == EAGLE3_MEASURED
    return {
        f"measured pass of drafter {drafter.kind.value!r}": drafter.active
        and (
            engine is not Backend.VLLM
            or drafter.kind is DrafterKind.BLOCK
            or (drafter.kind is DrafterKind.HEAD and not measured)
        ),
        "adaptive gamma": plan.speculation.adaptive,
    }


def missing_execution(plan: Plan, shape: ModelShape | None = None) -> list[str]:
    """The plan's values that the runtime cannot execute yet, one phrase each; empty if it can execute the plan.

    With `shape`, also the limits for this model.
    """
    evicting, drafts = EVICTIONS.get(plan.eviction.policy), plan.speculation.selection
    target = plan.attention.selection if plan.attention.active else None
    window, drafter = shape.window_tokens if shape else None, plan.speculation.drafter
    held = shape.weight_bits.format if shape and is_converted(shape) else None
    placed = window is not None and window < plan.workload.final_context  # layers hold windows alone
    mixed = shape is not None and len({attention.heads for attention, _ in shape.attentions}) > 1
    widest = 0 if shape is None or shape.is_mla else max((each.head_dim for each, _ in shape.attentions), default=0)
    softmax = next((need for need in OTHER_SOFTMAX if shape and need in shape.traits), None)
    checks = {
        f"eviction {plan.eviction.policy!r}": evicting and not evicting.executable,
        **_missing_of_stored(plan, shape),
        **_missing_offload(plan),
        f"target selection {plan.attention.selection.name!r}": target and not target.executable,
        f"draft selection {drafts.name!r}": not drafts.executable,
        f"draft selection {drafts.name!r} after an eviction that leaves layers of different lengths": len(
            set(layer_budgets(plan, 2))
        )
        > 1
        and plan.speculation.sparse,
        f"target selection {plan.attention.selection.name!r} after an eviction": target and evicting,
        f"draft selection {drafts.name!r} after an eviction": evicting and drafts.needs_head,
        f"draft selection {drafts.name!r}, which chooses by what a verification of all tokens scores": target
        and drafts.from_verification,
        f"drafter {drafter.kind.value!r}": drafter.kind is DrafterKind.BLOCK,
        "a cascade over offloaded KV": drafter.cascades and plan.placement.offload,
        "a retrieval head in a model with recurrent states": shape
        and shape.states
        and (drafts.needs_head or plan.attention.selection.needs_head),
        **(_missing_over_latents(plan) if shape and shape.is_mla else {}),
        f"{plan.parallel} ({plan.parallel.gpus} GPUs; vLLM does)": plan.parallel != SINGLE,
        f"selections of tokens for {softmax}": softmax and (target or plan.speculation.sparse),
        f"selections of tokens in heads of {widest} channels": widest > MAX_CHOSEN_HEAD_DIM
        and (target or plan.speculation.sparse),
        f"{held} weights as they are stored": held,
        f"codes, drafts, selections or evictions beyond a sliding window of {window} tokens": shape
        and exceeds_window(plan, shape),
        "anything but plain KV in heads of several sizes within a sliding window": mixed
        and not placed
        and not _keeps_plain_kv(plan),
        "offloaded KV beside layers that hold a sliding window": placed and plan.placement.offload,
        "evictions from chunks of a prompt beside layers that hold a sliding window": placed
        and plan.eviction.chunk_at(plan.workload.context),
    }
    return [name for name, missing in checks.items() if missing]


def _missing_of_stored(plan: Plan, shape: ModelShape | None) -> dict[str, object]:
    """What plans with stored weights lack: a file of such, and the dense embedding that trained heads read."""
    if not plan.weights.stored:
        return {}
    trained = plan.speculation.drafter.trained or any(
        selection.needs_head for selection in (plan.speculation.selection, plan.attention.selection)
    )
    name = f"{STORED_WEIGHTS}, of {shape.name} (its file stores {shape.weight_bits.format})" if shape else ""
    return {name: shape and not shape.weight_bits.stored.layers, f"a trained head beside {STORED_WEIGHTS}": trained}


def _keeps_plain_kv(plan: Plan) -> bool:
    """Whether target and drafts read all tokens in full precision, on the device."""
    chosen = plan.eviction.active or plan.attention.active or plan.speculation.sparse
    return not (plan.kv.format.quantized or chosen or plan.placement.offload)


def _missing_over_latents(plan: Plan) -> dict[str, object]:
    """What needs keys and values of each head, and so cannot be executed over latent rows."""
    return {
        "offloaded latent rows": plan.placement.offload,
        f"draft selection {plan.speculation.selection.name!r} among latent rows": plan.speculation.sparse,
        f"target selection {plan.attention.selection.name!r} among latent rows": plan.attention.active,
        f"eviction {plan.eviction.policy!r} of latent rows": plan.eviction.active,
    }


def allows_chunks(plan: Plan) -> bool:
    """Whether the plan's eviction, if it has one, may run after each chunk of a prompt."""
    return plan.eviction.active and EVICTIONS[plan.eviction.policy].chunked


def _missing_offload(plan: Plan) -> dict[str, object]:
    """Combinations with offloaded layers that cannot be executed, each with whether the plan has it."""
    if not plan.placement.offload:
        return {}
    kv, adaptive, selects = plan.kv.format, plan.placement.adaptive, plan.attention.active
    selections = plan.attention.selection, plan.speculation.selection
    scans_all_keys = any(selection.needs_all_keys for selection in selections)
    generated = plan.workload.new_tokens + plan.speculation.gamma + plan.kv.group  # they grow old in whole groups
    slots, max_tokens = plan.placement.budget, plan.attention.max_tokens(generated)
    return {
        f"adaptive placement of {kv.value!r} KV": adaptive and kv is KVFormat.SHADOW,
        "adaptive placement with drafts that gather codes": adaptive and plan.gathers_codes,
        "offloaded KV after an eviction": plan.eviction.active,
        "a selection by 'oracle' from offloaded KV": scans_all_keys,  # the host holds them
        f"offloaded KV in {kv.value!r}": kv is KVFormat.SHADOW and not selects,
        f"a target that reads up to {max_tokens} tokens of offloaded KV in slots for {slots} (placement.budget), with "
        "outliers and the generated tokens that it keeps": selects and slots < max_tokens,
        # Its 2-bit keys are those of codes on the device.
        f"a target's selection by {plan.attention.selection.name!r} from offloaded KV in {kv.value!r}": kv.buffered
        and plan.attention.selection.needs_codes,
        "drafts that choose by other means than a target that reads a selection of offloaded KV": selects
        and plan.speculation.active
        and not _choose_alike(plan),
    }


def _choose_alike(plan: Plan) -> bool:
    """Whether drafts select by the target's policy, apart from the number of tokens, and read the same codes."""
    target, drafts = plan.attention.selection, plan.speculation.selection
    if not isinstance(drafts, SparseSelection) or plan.speculation.codes is DraftCodes.UPPER:
        return False
    return replace(drafts, ratio=target.ratio, floor=target.min_tokens) == target


def only_estimated(plan: Plan, shape: ModelShape | None = None, *, has_head: bool = False) -> str | None:
    """Why the plan is only estimated, such as a missing retrieval head; None if the runtime executes it."""
    missing = missing_execution(plan, shape)
    if missing:
        return f"estimated only, the runtime cannot execute {', '.join(missing)} yet"
    if plan.speculation.drafter.kind is DrafterKind.HEAD and not plan.workload.drafter_head:
        return "estimated only: it needs a draft head of this model (--drafter-head); `distill --drafter` trains one"
    has_head = has_head or (shape is not None and shape.name in SHIPPED_HEADS)
    return None if has_head else missing_head(plan)


def missing_head(plan: Plan) -> str | None:
    """A message if the plan needs a retrieval head, which must first be trained; None otherwise."""
    if not (plan.speculation.selection.needs_head or plan.attention.selection.needs_head):
        return None
    return "estimated only: it needs a retrieval head for this model, which `ridgeplan distill` trains"


def uncalibrated(plan: Plan, profile: Profile) -> str | None:
    """A message if the profile lacks rates of the sparse attention kernels that the plan needs; None otherwise."""
    if not (plan.speculation.sparse or plan.attention.active) or SPARSE_CLASS in profile.classes:
        return None
    name = plan.speculation.selection.name if plan.speculation.sparse else plan.attention.selection.name
    return f"not calibrated on {profile.device}: kernels of {name!r}; run `ridgeplan calibrate`"


def exceeds_window(plan: Plan, shape: ModelShape) -> bool:
    """Whether codes, drafts, a selection or an eviction would reach beyond a sliding window that all layers have.

    Plain bf16 decoding alone may. Where some layers see all tokens, these are the ones that policies work on.
    """
    plain = not (plan.kv.format.quantized or plan.speculation.active or plan.eviction.active or plan.attention.active)
    if shape.window_layers < shape.layers:
        return False
    window = shape.window_tokens or plan.workload.final_context
    return plan.workload.final_context > window and not plain


# What the kernels that read chosen tokens lack.
OTHER_SOFTMAX = ("attention sinks", "attention soft cap")
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 512  # of the attention kernels for GPUs, whose tiles are powers of two
MAX_CHOSEN_HEAD_DIM = 256  # of those that read chosen tokens


def missing_architecture(shape: ModelShape, hardware: Hardware | None = None) -> str | None:
    """Why the runtime cannot run this model, on `hardware` if it is given; None if it can."""
    needs = ", ".join(layer_needs(shape))
    if shape.architecture in executable_architectures() and needs:
        return f"the runtime does not execute layers with {needs} yet"
    if shape.architecture not in executable_architectures():
        unread = families()[shape.architecture].unread if shape.architecture in families() else ""
        needed = f": its layers have {needs}" if needs else unread and f": it reads no checkpoints with {unread}"
        instead = executed_instead(shape.architecture)
        return f"the runtime does not execute {shape.architecture!r} yet{needed} ({instead})"
    held = shape.weight_bits.format
    if held not in LOADED_FORMATS:
        return f"the runtime does not load weights in {held!r} yet (it does {', '.join(loaded_formats())})"
    head_dim, on_gpu = padded_head_dim(shape.head_dim), hardware is not None and hardware.kind == "gpu"
    if shape.is_mla:
        head_dim = shape.latent_rank or 0  # the kernel's, of which the latent is the value
    if on_gpu and (head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1)):
        return f"no GPU kernel takes heads of {head_dim} values; they take powers of two from {MIN_HEAD_DIM}"
    widest = max(attention.head_dim for attention, _ in shape.attentions)
    if on_gpu and widest > MAX_HEAD_DIM and not shape.is_mla:
        return f"no GPU kernel takes heads of {widest} values yet; they take up to {MAX_HEAD_DIM}"
    widths = [width for mlp, _ in shape.mlps if mlp.experts for width in (shape.hidden, mlp.expert_intermediate)]
    odd = next((width for width in widths if width % TILE_OUTPUTS), None)
    if on_gpu and odd:
        return f"no GPU kernel takes experts of {odd} values; they take multiples of {TILE_OUTPUTS}"
    return None


def layer_needs(shape: ModelShape) -> list[str]:
    """What a model's layers have that the runtime does not execute."""
    attentions = [attention for attention, _ in shape.attentions]
    checks = {
        "states of Mamba-2, or that decay by channel": any(
            state.rule != DELTA_RULE or state.gate_rank for state, _ in shape.states
        ),
        "experts without a gate": any(mlp.experts and not mlp.gated for mlp, _ in shape.mlps),
        "experts beside a dense MLP": any(mlp.experts and mlp.intermediate for mlp, _ in shape.mlps),
        "experts on a projected stream": any(mlp.expert_hidden for mlp, _ in shape.mlps),
        "a cache that layers share": any(attention.shares_cache for attention in attentions),
        "per-layer embeddings": shape.layer_embedding_width > 0,
        "sparse indexer": any(attention.index_tokens for attention in attentions),
    }
    return [need for need, needed in checks.items() if needed]


def as_loaded(shape: ModelShape) -> ModelShape:
    """The model as the runtime holds it: weights of some formats in full precision, heads padded for the kernels."""
    if is_converted(shape):
        shape = replace(shape, weight_bits=shape.weight_bits.as_loaded)
    head_dim = padded_head_dim(shape.head_dim)
    if shape.is_mla or head_dim == shape.head_dim or shape.architecture not in executable_architectures():
        return shape
    bits = replace(shape.weight_bits, stored=StoredBits())  # blocks have no room for zeros between channels
    return replace(shape, head_dim=head_dim, groups=tuple(map(_with_padded_heads, shape.groups)), weight_bits=bits)


def _with_padded_heads(group: LayerGroup) -> LayerGroup:
    attention = group.attention
    if attention is None:
        return group
    head_dim = padded_head_dim(attention.head_dim)
    gate_width = attention.gate_width * head_dim // attention.head_dim
    return replace(group, attention=replace(attention, head_dim=head_dim, gate_width=gate_width))


def is_converted(shape: ModelShape) -> bool:
    """Whether loading changes the model's weights; those of architectures that the runtime does not load stay."""
    return shape.architecture in executable_architectures() and shape.weight_bits.converted


def swaps_draft_weights(plan: Plan) -> bool:
    """Whether, on a GPU, the plan's prompts use the memory of the draft's weights for their long buffers."""
    return plan.weights.draft_copy and bool(uses_draft_swap(plan.workload.context))


def missing_cost_model(plan: Plan, shape: ModelShape) -> str | None:
    """Why the cost model does not cover the plan's policies or weights for this model; None if it does."""
    if plan.weights.stored and not shape.weight_bits.stored.layers:
        return (
            f"{STORED_WEIGHTS} need matrices that products read as stored, and {shape.name} has none; allowed: GGUF "
            "files with the types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K, some also F16, BF16 or F32"
        )
    kinds = (EVICTIONS.get(plan.eviction.policy), plan.attention.selection, plan.speculation.selection)
    unsupported = next((kind.name for kind in kinds if kind and not kind.supports_mla), None)
    if not (shape.is_mla and unsupported):
        return None
    return (
        f"{unsupported} chooses tokens for each KV head, and {shape.name} caches one latent row for all heads; "
        "allowed: plans that read every token (StreamingLLM has a cost model, but does not run on latents)"
    )
