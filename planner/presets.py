"""The papers' systems as named points of the space of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from ridgeplan.planner.plan import (
    DraftCodes,
    DraftSelection,
    Eviction,
    EvictionPolicy,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    PlanError,
    Speculation,
    TargetAttention,
    TargetSelection,
    Weights,
    Workload,
)

Preset = Callable[[Workload], Plan]
SPARSE_RATIO = 0.07  # SpecAttn, appendix: near-optimal for all its designs
MAGICDEC_RATIO = 0.25  # QuantSpec, section 5.1: the baselines' budget is a quarter of the context
KV_BUDGET = 2048  # SpeContext, section 7.3
EVICTION_BUDGET = 1024


def autoregressive(workload: Workload) -> Plan:
    """Plain decoding, all in full precision: what speed-ups are measured against."""
    return Plan(workload)


def int8(workload: Workload) -> Plan:
    """Plain decoding on an INT8 KV cache: QuantSpec's target by itself."""
    return Plan(workload, kv=KVCache(KVFormat.INT8))


def int4_weights(workload: Workload) -> Plan:
    """Plain decoding with 4-bit target weights."""
    return Plan(workload, weights=Weights(target_bits=4, draft_bits=4))


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


def _self_speculation(selection: DraftSelection, gamma: int, ratio: float) -> Preset:
    def preset(workload: Workload) -> Plan:
        return Plan(workload, speculation=Speculation(gamma, selection=selection, ratio=ratio))

    return preset


def _evicting(policy: EvictionPolicy) -> Preset:
    def preset(workload: Workload) -> Plan:
        return Plan(workload, eviction=Eviction(policy, min(EVICTION_BUDGET, workload.context)))

    return preset


def _selecting(selection: TargetSelection) -> Preset:
    def preset(workload: Workload) -> Plan:
        return Plan(workload, attention=TargetAttention(selection, min(KV_BUDGET, workload.context)))

    return preset


def specontext(workload: Workload) -> Plan:
    """The retrieval head selects for the target, and layers leave the GPU at Algorithm 1's thresholds (SpeContext)."""
    budget = min(KV_BUDGET, workload.context)
    attention = TargetAttention(TargetSelection.RETRIEVAL_HEAD, budget)
    return Plan(workload, attention=attention, placement=Placement(True, budget))


def specattn_int4(workload: Workload) -> Plan:
    """Upper codes read only at the verified indices: SpecAttn on QuantSpec's cache, which no paper has tried."""
    base = quantspec(workload)
    return replace(base, speculation=Speculation(4, DraftCodes.UPPER, DraftSelection.VERIFIED, SPARSE_RATIO))


def dapq_quantspec(workload: Workload) -> Plan:
    """DapQ evicts after prefill, QuantSpec decodes what is left; no paper has tried it."""
    return replace(quantspec(workload), eviction=dapq(workload).eviction)


dapq = _evicting(EvictionPolicy.DAPQ)

PRESETS: dict[str, Preset] = {
    "autoregressive": autoregressive,
    "int8": int8,
    "int4-weights": int4_weights,
    "quantspec": quantspec,
    "quantspec-kv": quantspec_kv,
    "quantspec-weights": quantspec_weights,
    "quantspec-exact": quantspec_exact,
    "magicdec-streaming": _self_speculation(DraftSelection.STREAMING, 2, MAGICDEC_RATIO),
    "magicdec-snapkv": _self_speculation(DraftSelection.SNAPKV, 2, MAGICDEC_RATIO),
    "magicdec-quest": _self_speculation(DraftSelection.QUEST, 4, SPARSE_RATIO),
    "specextend": _self_speculation(DraftSelection.LAST_ACCEPTED, 4, SPARSE_RATIO),
    "specattn": _self_speculation(DraftSelection.VERIFIED, 7, SPARSE_RATIO),
    "specattn-int4": specattn_int4,
    "specontext": specontext,
    "quest": _selecting(TargetSelection.QUEST),
    "clusterkv": _selecting(TargetSelection.CLUSTERKV),
    "shadowkv": _selecting(TargetSelection.SHADOWKV),
    "dapq": dapq,
    "dapq-quantspec": dapq_quantspec,
    "snapkv": _evicting(EvictionPolicy.SNAPKV),
    "h2o": _evicting(EvictionPolicy.H2O),
    "pyramidkv": _evicting(EvictionPolicy.PYRAMIDKV),
    "streamingllm": _evicting(EvictionPolicy.STREAMING),
    "lacache": _evicting(EvictionPolicy.LACACHE),
}


def preset(name: str, workload: Workload) -> Plan:
    """The named preset for a workload. Raises PlanError with near names for an unknown one."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise PlanError(f"unknown preset {name!r}.{hint} Known: {', '.join(PRESETS)}")
    return PRESETS[name](workload)


def preset_name(plan: Plan) -> str:
    """The preset a plan is a point of, hyperparameters aside, else a description of its axes."""
    key = family_key(plan)
    return next((name for name, make in PRESETS.items() if family_key(make(plan.workload)) == key), describe(plan))


def describe(plan: Plan) -> str:
    """The axes that differ from plain decoding, in a few words."""
    speculation = plan.speculation
    words = [
        f"w{plan.weights.target_bits}" if plan.weights.target_bits != 16 else "",
        f"{plan.kv.format.value} KV" if plan.kv.quantized else "",
        plan.eviction.policy.value if plan.eviction.budget else "",
        "offload" if plan.placement.offload else "",
        plan.attention.selection.value if plan.attention.budget else "",
    ]
    if speculation.active:
        codes = "upper codes" if speculation.codes is DraftCodes.UPPER else "full codes"
        selected = "" if speculation.selection is DraftSelection.ALL else f" of {speculation.selection.value}"
        weights = f", w{plan.weights.draft_bits} drafts" if plan.weights.draft_differs else ""
        words.append(f"drafts on {codes}{selected}{weights}")
    return " + ".join(word for word in words if word) or "autoregressive"


def family_key(plan: Plan) -> tuple[object, ...]:
    """What names a system: everything but gamma, ratio, budgets and group sizes."""
    speculation = plan.speculation
    return (
        plan.weights.target_bits,
        plan.weights.draft_bits,
        plan.kv.format,
        plan.eviction.policy,
        plan.placement.offload,
        plan.attention.selection,
        speculation.active,
        speculation.codes,
        speculation.selection,
        plan.tensor_parallel,
    )
