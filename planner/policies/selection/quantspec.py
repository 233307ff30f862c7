"""QuantSpec (section 4): drafts read every token, but fewer bits of each and of the weights. Presets of `all`."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.plan import DraftCodes, KVCache, KVFormat, Plan, Speculation, Weights, Workload


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
