"""Selection policies: hyperparameters, cost and presets of each method that chooses which tokens a step reads.

Not published: a set chosen once a round is stale after a token or two at long context, and 2-bit keys choose nearly as
well as exact ones.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.roofline.plan.draft_selection import (
    ClusterKV,
    Oracle,
    Progressive,
    Quest,
    RetrievalHead,
    ShadowKV,
    SnapKV,
    SpecAttn,
    SpecExtend,
    StreamingLLM,
)
from ridgeplan.roofline.plan.plan import (
    MAX_PREFETCH,
    DraftCodes,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    Speculation,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policies.base import (
    KV_BUDGET,
    MAGICDEC_RATIO,
    Role,
    SelectionCost,
    TokenSelection,
    drafting,
    selecting,
)


def quantspec(workload: Workload) -> Plan:
    """INT4 weights and upper KV codes draft for an INT8-KV target (QuantSpec, section 4)."""
    return Plan(
        workload,
        weights=Weights(draft_bits=4),
        kv=KVCache(KVFormat.HIERARCHICAL),
        speculation=Speculation(4, DraftCodes.UPPER),
    )


def quantspec_kv(workload: Workload) -> Plan:
    """QuantSpec with full-precision draft weights (its Fig 4, KV cache only)."""
    return replace(quantspec(workload), weights=Weights())


def quantspec_weights(workload: Workload) -> Plan:
    """Drafts with INT4 weights over a full-precision cache (QuantSpec, Fig 4, weights only)."""
    return Plan(workload, weights=Weights(draft_bits=4), speculation=Speculation(4))


def quantspec_exact(workload: Workload) -> Plan:
    """Drafts read an INT4 shadow of the cache, the target the full-precision cache itself."""
    return replace(quantspec(workload), kv=KVCache(KVFormat.SHADOW))


def quantspec_int8(workload: Workload) -> Plan:
    """QuantSpec's cache, and its idea for weights: drafts read the upper 4 bits of one copy, the target all 8."""
    return replace(quantspec(workload), weights=Weights(target_bits=8, draft_bits=4))


def quantspec_int4(workload: Workload) -> Plan:
    """QuantSpec's cache with one copy of the weights, in 4 bits, that drafts and the target read."""
    return replace(quantspec(workload), weights=Weights(target_bits=4, draft_bits=4))


def autoregressive(workload: Workload) -> Plan:
    """Plain decoding in full precision, the baseline of speed-ups."""
    return Plan(workload)


def int8(workload: Workload) -> Plan:
    """Plain decoding on an INT8 KV cache: QuantSpec's target by itself."""
    return Plan(workload, kv=KVCache(KVFormat.INT8))


def int8_weights(workload: Workload) -> Plan:
    """Plain decoding with 8-bit target weights."""
    return Plan(workload, weights=Weights(target_bits=8, draft_bits=8))


def int8_weights_int8(workload: Workload) -> Plan:
    """Plain decoding with 8-bit target weights on an INT8 KV cache."""
    return Plan(workload, weights=Weights(target_bits=8, draft_bits=8), kv=KVCache(KVFormat.INT8))


def int4_weights(workload: Workload) -> Plan:
    """Plain decoding with 4-bit target weights."""
    return Plan(workload, weights=Weights(target_bits=4, draft_bits=4))


def int4_weights_int8(workload: Workload) -> Plan:
    """Plain decoding with 4-bit target weights on an INT8 KV cache."""
    return Plan(workload, weights=Weights(target_bits=4, draft_bits=4), kv=KVCache(KVFormat.INT8))


ALL = TokenSelection(
    name="all",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    presets={
        "autoregressive": autoregressive,
        "int8": int8,
        "int8-weights": int8_weights,
        "int8-weights-int8": int8_weights_int8,
        "int4-weights": int4_weights,
        "int4-weights-int8": int4_weights_int8,
        "quantspec": quantspec,
        "quantspec-kv": quantspec_kv,
        "quantspec-weights": quantspec_weights,
        "quantspec-exact": quantspec_exact,
        "quantspec-int8": quantspec_int8,
        "quantspec-int4": quantspec_int4,
    },
)


def streamingllm_cost(_: StreamingLLM) -> SelectionCost:
    """Nothing is scored, and all but one token were there before."""
    return SelectionCost(overlap=1.0)


STREAMINGLLM = TokenSelection(
    name="streamingllm",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=streamingllm_cost,
    presets={
        "magicdec-streaming": drafting(StreamingLLM(ratio=MAGICDEC_RATIO), 2),
        "streamingllm-target": selecting(StreamingLLM()),
    },
)


def snapkv_cost(_: SnapKV) -> SelectionCost:
    """Steps score nothing; the tokens that they read lie apart."""
    return SelectionCost(run_tokens=1)


SNAPKV = TokenSelection(
    name="snapkv",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=snapkv_cost,
    presets={"magicdec-snapkv": drafting(SnapKV(ratio=MAGICDEC_RATIO), 2)},
)


def quest_cost(selection: Quest) -> SelectionCost:
    """Two bounds and a score a page."""
    bounds = 2 / selection.page
    return SelectionCost(
        scored_keys=bounds, held_keys=bounds, score_rows=1 / selection.page, run_tokens=selection.page, overlap=0.71
    )


QUEST = TokenSelection(
    name="quest",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=quest_cost,
    presets={
        "magicdec-quest": drafting(Quest(), 4),
        "quest": selecting(Quest()),
    },
)


def specextend_cost(selection: SpecExtend) -> SelectionCost:
    """As for SpecAttn; the means of pages are ranked."""
    return SelectionCost(score_rows=1, run_tokens=selection.page, shared_by_heads=True)


SPECEXTEND = TokenSelection(
    name="specextend",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=specextend_cost,
    from_verification=True,
    presets={"specextend": drafting(SpecExtend(), 4)},
)


def specattn_cost(selection: SpecAttn) -> SelectionCost:
    """Verification adds up queries and the query heads of a KV head before it writes their scores."""
    return SelectionCost(score_rows=1, run_tokens=1, shared_by_heads=not selection.per_kv_head)


def specattn_int4(workload: Workload) -> Plan:
    """Upper codes of the selected tokens only: SpecAttn on QuantSpec's cache; not published."""
    return replace(quantspec(workload), speculation=Speculation(4, DraftCodes.UPPER, SpecAttn()))


SPECATTN = TokenSelection(
    name="specattn",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=specattn_cost,
    from_verification=True,
    presets={"specattn": drafting(SpecAttn(), 7), "specattn-int4": specattn_int4},
)


def progressive_cost(_: Progressive) -> SelectionCost:
    """2-bit keys are scanned in every layer, at what their groups cost; the fused kernel keeps their scores on chip."""
    return SelectionCost(run_tokens=1, overlap=0.72)


def progressive(workload: Workload) -> Plan:
    """2-bit keys choose, INT4 weights and upper codes draft, for QuantSpec's INT8-KV target."""
    return replace(quantspec(workload), speculation=Speculation(4, DraftCodes.UPPER, Progressive()))


def progressive_exact(workload: Workload) -> Plan:
    """The same for a full-precision target: drafts read an INT4 shadow of its cache."""
    return replace(progressive(workload), kv=KVCache(KVFormat.SHADOW))


def progressive_int8(workload: Workload) -> Plan:
    """The same with 8-bit weights, whose upper halves drafts read."""
    return replace(quantspec_int8(workload), speculation=progressive(workload).speculation)


def specontext_two_bit(workload: Workload) -> Plan:
    """SpeContext with 2-bit keys in the place of its head: they stay on the device when their layer leaves it.

    Every layer chooses by its own query, so that its loads wait for it.
    """
    chosen = selecting(Progressive(), KVFormat.SHADOW)(workload)
    return replace(chosen, placement=Placement(True, min(KV_BUDGET, workload.context)))


PROGRESSIVE = TokenSelection(
    name="progressive",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=progressive_cost,
    presets={
        "progressive": progressive,
        "progressive-exact": progressive_exact,
        "progressive-int8": progressive_int8,
        # 2-bit keys choose what the target itself reads, in full precision or as 8-bit codes; nothing is trained.
        "progressive-target": selecting(Progressive(), KVFormat.SHADOW),
        "progressive-target-int8": selecting(Progressive(), KVFormat.INT8),
        "specontext-two-bit": specontext_two_bit,
    },
)


def oracle_cost(_: Oracle) -> SelectionCost:
    """All keys are scanned in every layer, and a score a token and KV head is ranked."""
    return SelectionCost(scored_keys=1, score_rows=1, run_tokens=1)


ORACLE = TokenSelection(
    name="oracle",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=oracle_cost,
    searched=False,
    presets={"oracle-target": selecting(Oracle())},
)


def retrieval_head_cost(selection: RetrievalHead) -> SelectionCost:
    """The head's own keys, as many as one layer's, are scanned once for all layers.

    A score a token and KV head is ranked, of every layer if these choose for themselves; one set for all heads has
    their mean.
    """
    return SelectionCost(
        scored_keys=1,
        scores_one_layer=True,
        sets_by_layer=selection.by_layer,
        held_keys=1,
        score_rows=1,
        run_tokens=1,
        shared_by_heads=selection.level == "batch",
        projects=True,
        overlap=0.90 if selection.level == "batch" else 0.80,
    )


def specontext(workload: Workload) -> Plan:
    """The head selects for the target; layers are offloaded at Algorithm 1's thresholds (SpeContext).

    Its loads may run as far ahead as they can: their slots are there anyway.
    """
    placement = Placement(True, min(KV_BUDGET, workload.context), prefetch=MAX_PREFETCH)
    return replace(selecting(RetrievalHead())(workload), placement=placement)


RETRIEVAL_HEAD = TokenSelection(
    name="retrieval-head",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=retrieval_head_cost,
    presets={"specontext": specontext, "specontext-resident": selecting(RetrievalHead())},
)


LABELS = 1 / 64  # of the keys: an int32 beside 128 channels of 16 bits


def clusterkv_cost(selection: ClusterKV) -> SelectionCost:
    """A centroid a cluster, and for each token its cluster's number, by which its score is looked up and ranked."""
    read = 1 / selection.cluster + LABELS
    return SelectionCost(scored_keys=read, held_keys=read, score_rows=1, run_tokens=1, overlap=0.78)


CLUSTERKV = TokenSelection(
    name="clusterkv",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=clusterkv_cost,
    searched=False,
    presets={"clusterkv": selecting(ClusterKV())},
)


def shadowkv_cost(selection: ShadowKV) -> SelectionCost:
    """Landmarks are kept twice, as Quest's kernel reads bounds: two that are equal."""
    landmarks, chunks = 2 / selection.chunk, 1 / selection.chunk
    return SelectionCost(
        scored_keys=landmarks, held_keys=landmarks, score_rows=chunks, run_tokens=selection.chunk, overlap=0.79
    )


SHADOWKV = TokenSelection(
    name="shadowkv",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=shadowkv_cost,
    searched=False,
    presets={"shadowkv": selecting(ShadowKV())},
)
