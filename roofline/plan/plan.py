"""The plan: one point of a six-axis space, frozen, validated, with a lossless JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import fields_of_schema, json_or
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel
from ridgeplan.roofline.catalog.validation import brief, build
from ridgeplan.roofline.execution import (
    MAX_ACCEPTANCE_LENGTH,
    MAX_GAMMA,
    MAX_SUFFIX_TOKENS,
    MAX_TOKENS,
    QUANTIZATION_GROUPS,
    RoundKind,
    RoundShape,
    adaptive_gammas,
)
from ridgeplan.roofline.plan.policy import (
    EVICTIONS,
    MIN_RATIO,
    SELECTIONS,
    TARGET_SELECTIONS,
    AllTokens,
    PlanError,
    PlanPart,
    PromptSelection,
    SparseSelection,
    TokenEviction,
    TokenSelection,
)


class HostPart(StrEnum):
    """The part of a layer's KV that leaves the device."""

    ALL = "all"  # every old token; drafts read a budget of tokens that stay on the device
    LOWER = "lower"  # lower codes alone, which drafts never read: half the memory, and drafts as good as without


SCHEMA = 1
MAX_BATCH = 4096
NO_EVICTION = "none"
MAX_YARN_FACTOR = 64
MAX_MEMORY_BYTES = 10**18
MAX_PREFETCH = 8  # offloaded layers; each takes a slot on the device


class KVFormat(StrEnum):
    """How keys and values are stored."""

    FULL = "bf16"
    SHADOW = "bf16+int4"  # bf16 for the target and INT4 upper codes that only drafts read
    INT8 = "int8"
    HIERARCHICAL = "int4x2"  # upper codes for drafts, upper and lower for the target (QuantSpec, section 4.2)

    @property
    def quantized(self) -> bool:
        """Whether any codes are stored."""
        return self is not KVFormat.FULL

    @property
    def buffered(self) -> bool:
        """Whether old tokens are stored only as upper and lower codes, and recent ones in a full-precision buffer."""
        return self in (KVFormat.INT8, KVFormat.HIERARCHICAL)


class DraftCodes(StrEnum):
    """Which codes of a token a draft reads."""

    FULL = "full"
    UPPER = "upper"


class DrafterKind(StrEnum):
    """What proposes tokens below the self-drafts."""

    NONE = "none"
    SUFFIX = "suffix"  # what followed the longest earlier occurrence of the text's suffix (prompt lookup)
    HEAD = "head"  # a one-layer autoregressive head on the target's hidden states (EAGLE-3)
    BLOCK = "block"  # a drafter that proposes several tokens in one pass (DFlash, DSpark)


class TextKind(StrEnum):
    """Kinds of text, by which the acceptance of drafters differs."""

    PROSE = "prose"
    CODE = "code"
    DOCS = "docs"
    CHAT = "chat"


def require(condition: bool, message: str) -> None:
    """Raise PlanError(message) unless `condition` holds."""
    if not condition:
        raise PlanError(message)


def require_within(name: str, value: float, low: float, high: float) -> None:
    """Raise PlanError unless low <= value <= high."""
    require(low <= value <= high, f"{name} is {value}; allowed: {low} to {high}")


def _group() -> Any:
    return check.one_of(QUANTIZATION_GROUPS, default=128)


def _budget() -> Any:
    return check.whole(0, MAX_TOKENS, default=0)


@dataclass(frozen=True)
class Workload(PlanPart):
    """What a plan is for: a model on one or more GPUs of a kind, at a context and batch.

    text: the kind of text; "" if it is not known. acceptance_length: tokens of a pass that verifies four proposals of
    `drafter`, its own token included, as the user measured them; 0 if not known. drafter_head: folder of a trained
    head, for plans whose drafter is one. drafter_rows: file of the user's own rows of drafters on such a text, if any.
    """

    model: str = check.name_text()
    hardware: str = check.name_text()
    context: int = check.whole(1, MAX_TOKENS)  # tokens of a prompt
    new_tokens: int = check.whole(1, MAX_TOKENS, default=1024)
    batch: int = check.whole(1, MAX_BATCH, default=1)  # sequences
    yarn_factor: float = check.number(1, MAX_YARN_FACTOR, default=1.0)  # above 1: RoPE is scaled by YaRN
    parallel: Parallel = check.part(Parallel)  # how the model is divided among several such GPUs
    text: str = check.one_of(("", *map(str, TextKind)), default="")
    acceptance_length: float = check.number(0, MAX_TOKENS, default=0.0)
    drafter: DrafterKind = check.one_of(DrafterKind, default=DrafterKind.SUFFIX)
    drafter_head: str = check.text(default="")
    drafter_rows: str = check.text(default="")

    def _contradiction(self) -> str | None:
        if self.acceptance_length and not 1 <= self.acceptance_length <= MAX_ACCEPTANCE_LENGTH:
            allowed = f"allowed: 1 to {MAX_ACCEPTANCE_LENGTH} tokens, of a pass with 4 proposals"
            return f"acceptance_length is {self.acceptance_length:g}; {allowed}"
        return None

    @property
    def final_context(self) -> int:
        """Tokens of one sequence when generation ends."""
        return self.context + self.new_tokens

    @property
    def rank_batch(self) -> int:
        """Sequences of the data-parallel rank that has most; without data parallelism, the batch."""
        return -(-self.batch // self.parallel.data)

    @property
    def devices(self) -> str:
        """The hardware, and how many of it share the model: "8 x h200"."""
        return f"{self.parallel.gpus} x {self.hardware}" if self.parallel.gpus > 1 else self.hardware


@dataclass(frozen=True)
class Weights(PlanPart):
    """Bits of the target's weights and of the draft's; 16 means the machine's full precision.

    Drafts in 4 bits of an 8-bit target read the upper plane of the target's own weights: there is one copy. stored: the
    target's weights are those of a GGUF file, read as it stores them.
    """

    target_bits: int = check.one_of((16, 8, 4), default=16)
    draft_bits: int = check.one_of((16, 8, 4), default=16)
    group: int = _group()  # parameters that share a scale and a minimum, along the input dimension
    stored: bool = check.flag(False)

    def _contradiction(self) -> str | None:
        if self.stored and (self.target_bits, self.draft_bits) != (16, 16):
            bits = f"target_bits is {self.target_bits} and draft_bits {self.draft_bits}"
            return f"{bits} where stored is true; allowed: 16, as drafts read the target's weights"
        if self.draft_bits in (self.target_bits, 4):
            return None
        return f"draft_bits is {self.draft_bits}; allowed: 4, or {self.target_bits} as target_bits"

    @property
    def dense(self) -> bool:
        """Whether the target's weights are in the machine's full precision."""
        return self.target_bits == 16 and not self.stored

    @property
    def draft_differs(self) -> bool:
        """Whether drafts read fewer bits than the target."""
        return self.draft_bits != self.target_bits

    @property
    def hierarchical(self) -> bool:
        """Whether drafts read the upper codes of the target's 8-bit weights."""
        return self.target_bits == 8 and self.draft_bits == 4

    @property
    def draft_copy(self) -> bool:
        """Whether a second, smaller copy of the weights is kept for drafts."""
        return self.draft_differs and not self.hierarchical

    @property
    def target_format(self) -> tuple[int, int | None, bool, bool]:
        """Bits and group of the target's weights, and whether they are hierarchical, or as stored.

        Plans with the same share them.
        """
        return self.target_bits, None if self.target_bits == 16 else self.group, self.hierarchical, self.stored

    @property
    def quantized(self) -> bool:
        """Whether any weights have fewer bits than the checkpoint's."""
        return self.draft_bits < 16  # the target's never have fewer


@dataclass(frozen=True)
class KVCache(PlanPart):
    """Storage of keys and values; quantized formats keep `group` to 2 x `group` recent tokens unquantized."""

    format: KVFormat = check.one_of(KVFormat, default=KVFormat.FULL)
    group: int = _group()  # tokens

    @property
    def target_bits(self) -> int:
        """Bits per element of old tokens as the target reads them; 16 is full precision."""
        return 8 if self.format.buffered else 16

    @property
    def step(self) -> int:
        """Tokens by whose multiples layers may differ in length: flushes then come in all of them at once."""
        return self.group if self.format.quantized else 1


@dataclass(frozen=True)
class Eviction(PlanPart):
    """One-time eviction after prefill.

    policy: a name of `EVICTIONS`, or none. budget: number of prompt tokens that a layer keeps, on average over the
    layers. share: the same as a share of the workload's context, instead of `budget`. settings: the hyperparameters
    that differ from their defaults. chunk: most tokens of a prompt that go through all layers together; each layer
    evicts after every chunk. With 0, or with a chunk or a budget of the whole context, the prompt is one chunk.
    """

    policy: str = check.text(default=NO_EVICTION)
    budget: int = _budget()
    share: float = check.number(0, 1, default=0.0)
    settings: Mapping[str, Any] = check.values_by_name(default_factory=dict)
    chunk: int = check.whole(0, MAX_TOKENS, default=0)

    def _contradiction(self) -> str | None:
        if self.policy not in (NO_EVICTION, *EVICTIONS):
            return f"policy is {brief(self.policy)}; allowed: {', '.join((NO_EVICTION, *EVICTIONS))}"
        if self.policy == NO_EVICTION:
            detail = self.share or self.settings or self.chunk
            problem = "share, settings or chunk without a policy"
            return problem if detail else _budget_problem("eviction", False, self.budget)
        if self.share and self.budget:
            return f"budget is {self.budget} and share {self.share}; allowed: one of them"
        return None if self.share else _budget_problem("eviction", True, self.budget)

    @property
    def active(self) -> bool:
        """Whether any token is evicted."""
        return self.policy != NO_EVICTION

    @property
    def method(self) -> TokenEviction | None:
        """The policy with its hyperparameters; None without eviction. Raises PlanError for those out of range."""
        if not self.active:
            return None
        kind = EVICTIONS[self.policy]
        chunked = f"eviction chunk is {self.chunk}; allowed: 0, as {kind.name} scores a whole prompt at once"
        require(kind.chunked or not self.chunk, chunked)
        return build(kind, dict(self.settings), f"{kind.name} settings: ")

    def tokens(self, context: int) -> int:
        """The budget in tokens, for prompts of up to `context`."""
        return self.budget or math.ceil(self.share * context)

    def chunk_at(self, context: int) -> int:
        """Most tokens that go through the model together where prompts have up to `context`; 0: all of a prompt.

        A chunk that holds all of them is an eviction at once.
        """
        return self.chunk if max(self.chunk, self.tokens(context)) < context else 0


@dataclass(frozen=True)
class Placement(PlanPart):
    """Where KV is kept: all on the GPU, or layers are offloaded at Algorithm 1's thresholds (SpeContext).

    The last layer leaves first. A target that reads everything has offloaded codes streamed to it at every step or
    round; one that selects has only the tokens loaded that are missing (SpeContext, section 5.4).
    """

    offload: bool = check.flag(False)
    budget: int = _budget()  # tokens per offloaded layer that are on the GPU at a step
    part: HostPart = check.one_of(HostPart, default=HostPart.ALL)
    memory_bytes: int = check.whole(0, MAX_MEMORY_BYTES, default=0)  # what the GPU may use; 0: all that it has
    prefetch: int = check.whole(1, MAX_PREFETCH, default=1)  # offloaded layers copied ahead of the one that is read
    adaptive: bool = check.flag(False)  # layers leave while tokens are generated, not all at the start (Algorithm 2)
    elastic: bool = check.flag(
        True
    )  # of chosen tokens only those are loaded that the slots on the GPU lack (section 5.4)

    def _contradiction(self) -> str | None:
        details = self.part, self.memory_bytes, self.prefetch, self.adaptive, self.elastic
        if not self.offload and details != (HostPart.ALL, 0, 1, False, True):
            return "part, memory_bytes, prefetch, adaptive or elastic is set; allowed: only where offload is true"
        if self.adaptive and self.part is HostPart.LOWER:
            return "adaptive is true with part 'lower'; allowed: part 'all'"
        if self.part is HostPart.LOWER:
            return None if self.budget == 0 else f"budget is {self.budget}; allowed: 0 when lower codes are offloaded"
        return _budget_problem("placement", self.offload, self.budget)


@dataclass(frozen=True)
class TargetAttention(PlanPart):
    """What each of the target's queries reads: everything, or `budget` tokens that a policy selects for it.

    The budget stands in the place of the selection's `ratio` and `floor`, which are of drafts.
    """

    selection: TokenSelection = check.variant(TARGET_SELECTIONS, default=AllTokens())  # noqa: RUF009
    budget: int = _budget()

    def _contradiction(self) -> str | None:
        usual = type(self.selection)()  # type: ignore[call-arg]
        for name in ("ratio", "floor") if self.active else ():
            if getattr(self.selection, name) != getattr(usual, name):
                return f"{name} of the target's selection is {getattr(self.selection, name)}; allowed: a budget instead"
        return _budget_problem("attention", self.active, self.budget)

    @property
    def active(self) -> bool:
        """Whether the target reads only some of the tokens."""
        return not isinstance(self.selection, AllTokens)

    @property
    def chosen(self) -> TokenSelection:
        """The selection with the budget as its floor and in effect no ratio, so that it reads the budget."""
        if not isinstance(self.selection, SparseSelection):
            return self.selection
        return replace(self.selection, ratio=MIN_RATIO, floor=self.budget)

    @property
    def keeps_generated(self) -> bool:
        """Whether generated tokens are read whole, beside the budget."""
        return isinstance(self.selection, PromptSelection) and self.selection.keep_generated

    def max_tokens(self, new_tokens: int) -> int:
        """Tokens that a query may read after `new_tokens` generated ones; 0 for everything."""
        return self.budget and self.budget + self.selection.unbudgeted_tokens + new_tokens * self.keeps_generated


@dataclass(frozen=True)
class Drafter(PlanPart):
    """What proposes `depth` tokens at a time, and the tier that verifies them first.

    passes: passes of the self-draft in a round, each of which verifies proposals (a cascade); 0: the target verifies
    them itself. min_match: fewest tokens of the text's suffix that must occur earlier. window: latest tokens that a
    head's attention reads; 0 for all.
    """

    kind: DrafterKind = check.one_of(DrafterKind, default=DrafterKind.NONE)
    depth: int = check.whole(0, MAX_GAMMA, default=0)
    passes: int = check.whole(0, MAX_GAMMA, default=0)
    min_match: int = check.whole(1, MAX_SUFFIX_TOKENS, default=2)
    window: int = check.whole(0, MAX_TOKENS, default=0)

    def _contradiction(self) -> str | None:
        if self.active != (self.depth > 0):
            allowed = f"1 to {MAX_GAMMA}" if self.active else "0 without a drafter"
            return f"drafter's depth is {self.depth}; allowed: {allowed}"
        if self.passes and not self.active:
            return f"drafter's passes is {self.passes}; allowed: 0 without a drafter"
        if self.window and not self.trained:
            return f"drafter's window is {self.window}; allowed: 0 without a head or a block drafter"
        return None

    @property
    def active(self) -> bool:
        """Whether anything proposes tokens."""
        return self.kind is not DrafterKind.NONE

    @property
    def trained(self) -> bool:
        """Whether it has weights of its own."""
        return self.kind in (DrafterKind.HEAD, DrafterKind.BLOCK)

    @property
    def cascades(self) -> bool:
        """Whether the self-draft verifies proposals before the target does."""
        return self.passes > 0


@dataclass(frozen=True)
class Speculation(PlanPart):
    """Self-speculation: gamma drafts per round, which read these codes of the tokens that a policy selects.

    adaptive: gamma is the most drafts of a round; the engine chooses how many from the acceptance that it measures.
    drafter: proposes tokens to these drafts, or to the target instead of them.
    """

    gamma: int = check.whole(0, MAX_GAMMA, default=0)
    codes: DraftCodes = check.one_of(DraftCodes, default=DraftCodes.FULL)
    selection: TokenSelection = check.variant(SELECTIONS, default=AllTokens())  # noqa: RUF009
    adaptive: bool = check.flag(False)
    drafter: Drafter = check.part(Drafter)

    def _contradiction(self) -> str | None:
        if self.adaptive and not self.active:
            return "adaptive is true with gamma 0; allowed: gamma of 1 or more, the most drafts of a round"
        drafter = self.drafter
        if drafter.cascades:
            if self.sparse:
                return f"a drafter's passes draft on {self.selection.name!r}; allowed: selection 'all' in a cascade"
            if not drafter.passes <= self.gamma <= drafter.passes * (drafter.depth + 1):
                most = min(MAX_GAMMA, drafter.passes * (drafter.depth + 1))
                return f"gamma is {self.gamma} with {drafter.passes} passes; allowed: {drafter.passes} to {most}"
        elif drafter.active:
            if self.gamma != drafter.depth:
                return (
                    f"gamma is {self.gamma} with a drafter of depth {drafter.depth}; allowed: the same without passes"
                )
            if self.sparse or self.codes is not DraftCodes.FULL:
                return "codes or selection are of self-drafts that a drafter replaces; allowed: their defaults"
        return None

    @property
    def self_drafts(self) -> bool:
        """Whether the model itself drafts, with fewer bits or tokens."""
        return self.active and (self.drafter.cascades or not self.drafter.active)

    @property
    def adapts_to_text(self) -> bool:
        """Whether every round, used or not, tells how good proposals are on the text, and the next one adapts."""
        return self.adaptive and self.drafter.kind is DrafterKind.SUFFIX

    @property
    def round_kind(self) -> RoundKind:
        """The plan's largest round."""
        drafter = self.drafter
        return RoundShape(self.gamma, drafter.passes, drafter.depth) if drafter.active else self.gamma

    @property
    def round_kinds(self) -> tuple[RoundKind, ...]:
        """The rounds that this plan may have; where they adapt, plain decoding first."""
        drafter = self.drafter
        if not (self.adaptive and drafter.active):
            return self.gammas if self.adaptive else (self.round_kind,)
        if not drafter.cascades:
            return (0, *(RoundShape(depth, 0, depth) for depth in adaptive_gammas(drafter.depth)[1:]))
        passes = adaptive_gammas(drafter.passes)[1:]
        cascades = (RoundShape(min(self.gamma, n * (drafter.depth + 1)), n, drafter.depth) for n in passes)
        to_target = min(drafter.depth, self.gamma)
        return (0, *passes, RoundShape(to_target, 0, to_target), *cascades)

    def with_gamma(self, gamma: int) -> Speculation:
        """The same with another gamma, which a drafter follows: by its depth, or its passes where it must."""
        drafter = self.drafter
        if drafter.cascades:
            fewest = -(-gamma // (drafter.depth + 1))
            drafter = replace(drafter, passes=min(gamma, max(drafter.passes, fewest)))
        elif drafter.active:
            drafter = replace(drafter, depth=gamma)
        return replace(self, gamma=gamma, drafter=drafter)

    @property
    def overhang(self) -> int:
        """Tokens beyond gamma that a pass of the self-draft may write to the cache."""
        return self.drafter.depth if self.drafter.cascades else 0

    @property
    def active(self) -> bool:
        """Whether any token is drafted."""
        return self.gamma > 0

    @property
    def gammas(self) -> tuple[int, ...]:
        """The drafts that a round of this plan may have, ascending."""
        return adaptive_gammas(self.gamma) if self.adaptive else (self.gamma,)

    @property
    def ratio(self) -> float:
        """The share of the cached tokens that drafts may read."""
        return self.selection.ratio

    @property
    def sparse(self) -> bool:
        """Whether drafts read only some of the tokens."""
        return not isinstance(self.selection, AllTokens)

    def with_ratio(self, ratio: float) -> Speculation:
        """The same speculation at another ratio."""
        if ratio == self.ratio:
            return self
        return replace(self, selection=replace(self.selection, ratio=ratio))


def _budget_problem(axis: str, active: bool, budget: int) -> str | None:
    if active == (budget > 0):
        return None
    return f"budget is {budget}; allowed: {f'1 to {MAX_TOKENS}' if active else f'0 when {axis} is off'}"


@dataclass(frozen=True)
class Plan(PlanPart):
    """A workload with a value on every axis. Raises PlanError for values that are not allowed."""

    workload: Workload = check.part(Workload, required=True)
    weights: Weights = check.part(Weights)
    kv: KVCache = check.part(KVCache)
    eviction: Eviction = check.part(Eviction)
    placement: Placement = check.part(Placement)
    attention: TargetAttention = check.part(TargetAttention)
    speculation: Speculation = check.part(Speculation)

    @property
    def parallel(self) -> Parallel:
        """Degrees of parallelism; what spans several GPUs is priced here, and executed by another engine."""
        return self.workload.parallel

    @property
    def gathers_codes(self) -> bool:
        """Whether anything chooses by codes, or drafts gather upper ones: planes by token are then kept beside them."""
        upper = self.speculation.codes is DraftCodes.UPPER
        chosen_by = (self.attention.selection, self.speculation.selection)
        return (self.speculation.sparse and upper) or any(selection.needs_codes for selection in chosen_by)

    @property
    def loads_chosen(self) -> bool:
        """Whether what steps choose of layers on the host is loaded to the device, token by token."""
        return self.attention.active or (self.speculation.sparse and not self.kv.format.buffered)

    def _contradiction(self) -> str | None:
        upper = self.speculation.codes is DraftCodes.UPPER
        if upper and self.kv.format not in (KVFormat.SHADOW, KVFormat.HIERARCHICAL):
            stored = f"kv format {self.kv.format.value!r}"
            return f"codes is 'upper' with {stored}; allowed: 'bf16+int4' or 'int4x2', which store upper codes"
        for selection in (self.attention.selection, self.speculation.selection):
            if selection.needs_codes and not self.kv.format.quantized:
                return f"selection is {selection.name!r} with kv format 'bf16'; allowed: formats with codes"
        if self.placement.offload and self.placement.part is HostPart.ALL and self.attention.active:
            slots, read = self.placement.budget, self.attention.budget
            if slots < read:
                return f"placement's budget is {slots} with a target that reads {read} tokens; allowed: {read} or more"
        if self.placement.part is HostPart.LOWER and (
            self.kv.format is not KVFormat.HIERARCHICAL or (self.speculation.active and not upper)
        ):
            return "part is 'lower'; allowed: with kv format 'int4x2', and drafts that read upper codes"
        if not self.speculation.active and (upper or self.weights.draft_differs):
            return "gamma is 0 with draft codes or draft weights set; allowed: gamma of 1 or more"
        if self.speculation.drafter.active and not self.speculation.drafter.cascades and self.weights.draft_copy:
            return "draft weights are set with a drafter that feeds the target; allowed: the target's, or passes"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, with its schema version first.

        Plans for a single GPU have no degrees but `tensor_parallel`, which all plans have had beside their axes. Those
        without a trained head, without rows of drafters, or without stored weights do not name any.
        """
        values = asdict(self)
        if self.parallel == SINGLE:
            del values["workload"]["parallel"]
        for path in ("drafter_head", "drafter_rows"):
            if not values["workload"][path]:
                del values["workload"][path]
        if not self.weights.stored:
            del values["weights"]["stored"]
        return {"schema": SCHEMA, **values, "tensor_parallel": self.parallel.tensor}

    def to_json(self, indent: int | None = 2) -> str:
        """Exact JSON: `Plan.from_json(plan.to_json()) == plan`."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Parse and validate untrusted data. Raises PlanError, one line that lists the values that are wrong.

        "specs" of a plan's file describe its model and machine (planner/plan_file.py) and are not the plan's.
        """
        values = fields_of_schema(data, SCHEMA, "make it again with `ridgeplan plan`", PlanError)
        values.pop("specs", None)
        changes = _selection_with_ratio(values) | _named_target_selection(values) | _parallel_workload(values)
        values.pop("tensor_parallel", None)
        return build(cls, values | changes)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parse and validate untrusted JSON text. Raises PlanError."""
        return cls.from_dict(json_or(PlanError, text, "a JSON plan"))


def _selection_with_ratio(values: dict[str, Any]) -> dict[str, Any]:
    """The speculation of a plan's file, where it is one of the first: there a ratio stood beside a selection's name."""
    speculation = values.get("speculation")
    if not isinstance(speculation, dict):
        return {}
    selection = speculation.get("selection", "")
    if isinstance(selection, dict) and "pool" in selection:  # SnapKV's pooling had that name
        renamed = {"pooling" if name == "pool" else name: value for name, value in selection.items()}
        return {"speculation": speculation | {"selection": renamed}}
    if not isinstance(selection, str):
        return {}
    kept = {name: value for name, value in speculation.items() if name not in ("selection", "ratio")}
    named = {"name": speculation.get("selection", "all")}
    if "ratio" in speculation:
        named["ratio"] = speculation["ratio"]
    return {"speculation": kept | {"selection": named}}


def _parallel_workload(values: dict[str, Any]) -> dict[str, Any]:
    """The workload of a plan's file, where only the degree of tensor parallelism beside the axes says its GPUs."""
    workload, tensor = values.get("workload"), values.get("tensor_parallel", 1)
    if not isinstance(workload, dict) or "parallel" in workload or (type(tensor) is int and tensor == 1):
        return {}
    return {"workload": workload | {"parallel": {"tensor": tensor}}}


def _named_target_selection(values: dict[str, Any]) -> dict[str, Any]:
    """The target's attention of a plan's file, where it is one of the first: there a selection was a name alone."""
    attention = values.get("attention")
    if not isinstance(attention, dict) or not isinstance(attention.get("selection"), str):
        return {}
    name = attention["selection"]
    return {"attention": attention | {"selection": {"name": "all" if name == "full" else name}}}
