"""Selection policies: the tokens that a step of drafts or of a target reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from ridgeplan.roofline.catalog.validation import flag, one_of, whole
from ridgeplan.roofline.plan.plan import (
    MAX_PREFETCH,
    DraftCodes,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    Speculation,
    TargetAttention,
    Workload,
)
from ridgeplan.roofline.plan.policies.dense import quantspec, quantspec_int8
from ridgeplan.roofline.plan.policy import (
    KV_BUDGET,
    MAX_KEPT,
    RECENT,
    SINKS,
    Preset,
    PromptSelection,
    SelectionCost,
    SparseSelection,
    TokenSelection,
    policy,
    policy_name,
)

PAGES = (16, 32)  # tokens; they divide every group
MAGICDEC_RATIO = 0.25  # QuantSpec, section 5.1: the baselines' budget is a quarter of the context


def draft_preset(selection: TokenSelection, gamma: int) -> Preset:
    """Full-precision drafts that read the selected tokens."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, speculation=Speculation(gamma, selection=selection))

    return preset


def target_preset(selection: TokenSelection, kv: KVFormat = KVFormat.FULL) -> Preset:
    """Plain decoding whose target reads up to KV_BUDGET tokens a step."""

    def preset(workload: Workload) -> Plan:
        attention = TargetAttention(selection, min(KV_BUDGET, workload.context))
        return Plan(workload, kv=KVCache(kv), attention=attention)

    return preset


@policy
class StreamingLLM(SparseSelection):
    """The sinks and the latest tokens (Xiao et al. 2024)."""

    name: str = policy_name("streamingllm")

    for_target: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    selected_before_pass: ClassVar[bool] = True
    supports_mla: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """Nothing is scored, and all but one token were read by the previous step."""
        return SelectionCost(overlap=1.0)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """MagicDec's drafts, and a target that streams."""
        return {
            "magicdec-streaming": draft_preset(cls(ratio=MAGICDEC_RATIO), 2),
            "streamingllm-target": target_preset(cls()),
        }


@policy
class SnapKV(SparseSelection):
    """The tokens that the prompt's last `window` queries attend to most (Li et al. 2024, section 4).

    Scores are max-pooled over `pooling` tokens, so that what surrounds a token stays with it.
    """

    name: str = policy_name("snapkv")
    window: int = whole(1, 256, default=32)
    pooling: int = one_of((1, 3, 5, 7, 9, 11, 13), default=7)

    searched: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """Steps score nothing; the tokens that they read are not contiguous."""
        return SelectionCost(page_tokens=1)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """MagicDec's drafts."""
        return {"magicdec-snapkv": draft_preset(cls(ratio=MAGICDEC_RATIO), 2)}


@policy
class Quest(PromptSelection):
    """Pages whose keys may score highest, by the minimum and maximum of each channel (Tang et al. 2024)."""

    name: str = policy_name("quest")
    page: int = one_of(PAGES, default=16)

    for_target: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    per_query: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """Two bounds and a score per page."""
        bounds = 2 / self.page
        return SelectionCost(
            scored_keys=bounds,
            held_keys=bounds,
            scores_per_token=1 / self.page,
            page_tokens=self.page,
            overlap=0.71,
        )

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """MagicDec's drafts, and Quest's own target."""
        return {"magicdec-quest": draft_preset(cls(), 4), "quest": target_preset(cls())}


@policy
class SpecExtend(SparseSelection):
    """Pages that the last accepted token attended to most, by the mean of their scores (Cha et al. 2025).

    rows: the query of the last verification that scores. "accepted" is that of the last accepted token, which is known
    only after the verification, so that every query leaves scores. "last" is the last one, even if its token was
    rejected, and needs the scores of one query only.
    """

    name: str = policy_name("specextend")
    page: int = one_of((1, *PAGES), default=32)
    rows: str = one_of(("accepted", "last"), default="accepted")

    searched: ClassVar[bool] = True
    from_verification: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """As SpecAttn's; the means of pages are ranked."""
        by_query = self.rows == "accepted"
        return SelectionCost(
            scores_per_token=1, page_tokens=self.page, shared_by_kv_heads=True, scored_by_query=by_query
        )

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """SpecExtend's drafts."""
        return {"specextend": draft_preset(cls(), 4)}


@policy
class SpecAttn(SparseSelection):
    """The prefix tokens with the highest attention logits of the last verification (SpecAttn, now Vegas, section 3.3).

    Both names are of one paper: arXiv 2602.07223, code platformxlab/vegas.

    rows: the verification's first and last query (Eq 3), all of them (Eq 2), or those whose tokens were accepted, which
    the paper's ablation compares (section 3.2). score: logits, or attention weights
    exp(logit - lse). per_kv_head: a set for each KV head; in the paper a layer's heads share one. Tokens that came
    since that verification are read beside the budget. No sinks or recent tokens take part of it by default.
    """

    name: str = policy_name("specattn")
    rows: str = one_of(("ends", "all", "accepted"), default="ends")
    score: str = one_of(("probabilities", "logits"), default="logits")
    per_kv_head: bool = flag(False)
    sinks: int = whole(0, MAX_KEPT, default=0)
    recent: int = whole(0, MAX_KEPT, default=0)

    searched: ClassVar[bool] = True
    from_verification: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """Verification adds up queries and the query heads of a KV head before it writes their scores."""
        return SelectionCost(
            scores_per_token=1, page_tokens=1, shared_by_kv_heads=not self.per_kv_head,
            scored_by_query=self.rows == "accepted",
        )  # fmt: skip

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """The paper's drafts."""
        return {"specattn": draft_preset(cls(), 7)}


@policy
class SpecAttnWeights(SpecAttn):
    """SpecAttn by attention weights, whose budget always holds sinks and recent tokens; not published.

    The weights are exp(logit - lse) with the log-sum-exps of the verification before (released code; appendix A of the
    paper prefers logits).
    """

    name: str = policy_name("specattn-weights")
    score: str = one_of(("probabilities", "logits"), default="probabilities")
    sinks: int = whole(0, MAX_KEPT, default=SINKS)
    recent: int = whole(0, MAX_KEPT, default=RECENT)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """Drafts in full precision, and drafts that read upper codes of the selected tokens."""

        def specattn_int4(workload: Workload) -> Plan:
            return replace(quantspec(workload), speculation=Speculation(4, DraftCodes.UPPER, cls()))

        return {"specattn-weights": draft_preset(cls(), 7), "specattn-int4": specattn_int4}


@policy
class Progressive(SparseSelection):
    """The tokens that each draft's query scores highest by 2-bit keys, for each KV head; not published.

    The 2-bit keys are the upper bits of the cache's codes. They select nearly as well as exact keys, and a set that is
    selected once a round is stale after a token or two at long context.
    """

    name: str = policy_name("progressive")

    for_target: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    per_query: ClassVar[bool] = True
    needs_codes: ClassVar[bool] = True
    attention_class: ClassVar[str | None] = "progressive_attention"

    def cost(self) -> SelectionCost:
        """2-bit keys are scanned in every layer at the cost of their groups; the fused kernel keeps scores on chip."""
        return SelectionCost(page_tokens=1, overlap=0.72)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """Drafts on QuantSpec's caches, and targets that read what 2-bit keys select; nothing is trained."""
        speculation = Speculation(4, DraftCodes.UPPER, cls())

        def progressive(workload: Workload) -> Plan:
            """INT4 weights and upper codes draft for QuantSpec's INT8-KV target."""
            return replace(quantspec(workload), speculation=speculation)

        def progressive_exact(workload: Workload) -> Plan:
            """The same for a full-precision target: drafts read an INT4 shadow of its cache."""
            return replace(progressive(workload), kv=KVCache(KVFormat.SHADOW))

        def progressive_int8(workload: Workload) -> Plan:
            """The same with 8-bit weights, whose upper halves drafts read."""
            return replace(quantspec_int8(workload), speculation=speculation)

        return {
            "progressive": progressive,
            "progressive-exact": progressive_exact,
            "progressive-int8": progressive_int8,
            "progressive-target": target_preset(cls(), KVFormat.SHADOW),
            "progressive-target-int8": target_preset(cls(), KVFormat.INT8),
            # SpeContext with 2-bit keys in place of its head: they stay on the device when their layer leaves it.
            # Every layer selects by its own query, so that its loads wait for it.
            "specontext-two-bit": offload_preset(target_preset(cls(), KVFormat.SHADOW)),
        }


@policy
class Oracle(SparseSelection):
    """The tokens that each draft's query scores highest by the keys that it reads: a bound for the other policies."""

    name: str = policy_name("oracle")

    for_target: ClassVar[bool] = True
    per_query: ClassVar[bool] = True
    needs_all_keys: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """All keys are scanned in every layer, and a score per token and KV head is ranked."""
        return SelectionCost(scored_keys=1, scores_per_token=1, page_tokens=1)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """A target's bound."""
        return {"oracle-target": target_preset(cls())}


@policy
class RetrievalHead(SparseSelection):
    """The tokens that SpeContext's retrieval head scores highest (section 4.3).

    level: "head" for a set for each KV head of the target, "batch" for one that they share (Fig 5). by_layer: whether
    each layer has sets of its own, by a head that was trained for that; in the paper all layers share them.
    """

    name: str = policy_name("retrieval-head")
    level: str = one_of(("head", "batch"), default="head")
    by_layer: bool = flag(False)

    for_target: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    per_query: ClassVar[bool] = True
    selected_before_pass: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def _contradiction(self) -> str | None:
        if self.by_layer and self.level == "batch":
            return "by_layer is true with level 'batch'; allowed: level 'head'"
        return super()._contradiction()

    def cost(self) -> SelectionCost:
        """The head's own keys, as many as one layer's, are scanned once for all layers.

        A score per token and KV head is ranked, of every layer if these select for themselves; one set for all heads
        has their mean. Its projections, their rotation, positions and budgets are small operations of torch.
        """
        shared = self.level == "batch"
        return SelectionCost(
            scored_keys=1, scored_once=True, set_per_layer=self.by_layer, held_keys=1, scores_per_token=1,
            normalizes_logits=not self.by_layer, page_tokens=1, shared_by_kv_heads=shared, has_projections=True,
            small_kernels=70, overlap=0.90 if shared else 0.80,
        )  # fmt: skip

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """SpeContext, whose layers leave at the thresholds of Algorithm 1, and the same with all on the device."""
        return {
            # Its loads may run as far ahead as they can: their slots are there anyway.
            "specontext": offload_preset(target_preset(cls()), prefetch=MAX_PREFETCH, adaptive=True),
            "specontext-resident": target_preset(cls()),
        }


def offload_preset(preset: Preset, prefetch: int = 1, adaptive: bool = False) -> Preset:
    """A preset with layers on the host, of which the device holds KV_BUDGET tokens each."""

    def offloaded(workload: Workload) -> Plan:
        placement = Placement(True, min(KV_BUDGET, workload.context), prefetch=prefetch, adaptive=adaptive)
        return replace(preset(workload), placement=placement)

    return offloaded


LABELS = 1 / 64  # of the keys: an int32 beside 128 channels of 16 bits
FLAGS = 1 / 256  # of a key: a byte beside 128 channels of 16 bits


@policy
class ClusterKV(PromptSelection):
    """Clusters of `cluster` keys on average, by their centroids (Liu et al. 2024, sections 3.2 and 3.3)."""

    name: str = policy_name("clusterkv")
    cluster: int = whole(2, 1024, default=80)

    for_target: ClassVar[bool] = True
    per_query: ClassVar[bool] = True

    def cost(self) -> SelectionCost:
        """A centroid per cluster, and for each token its cluster's number, by which its score is looked up."""
        read = 1 / self.cluster + LABELS
        return SelectionCost(scored_keys=read, held_keys=read, scores_per_token=1, page_tokens=1, overlap=0.78)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """ClusterKV's own target."""
        return {"clusterkv": target_preset(cls())}


@policy
class ShadowKV(PromptSelection):
    """Chunks of keys by their means, and beside the budget the `outliers` chunks that these describe worst.

    Sun et al. 2024, section 4. Keys and values are stored in full precision and full rank: low-rank keys, and values on
    the host whatever fits, are left out (docs/papers.md).
    """

    name: str = policy_name("shadowkv")
    chunk: int = one_of((8, *PAGES), default=8)
    outliers: int = whole(0, MAX_KEPT, default=48)

    for_target: ClassVar[bool] = True
    per_query: ClassVar[bool] = True

    @property
    def unbudgeted_tokens(self) -> int:
        """The outlier chunks."""
        return self.outliers * self.chunk

    def cost(self) -> SelectionCost:
        """Landmarks are stored twice, because Quest's kernel reads two bounds, which are equal here.

        Each chunk also has a flag that tells whether it is an outlier.
        """
        landmarks, chunks = 2 / self.chunk, 1 / self.chunk
        return SelectionCost(
            scored_keys=landmarks + FLAGS * chunks,
            held_keys=landmarks + FLAGS * chunks,
            scores_per_token=chunks,
            page_tokens=self.chunk,
            overlap=0.75,
        )

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """ShadowKV's own target."""
        return {"shadowkv": target_preset(cls())}
