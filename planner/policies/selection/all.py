"""All tokens are read: plain decoding, and QuantSpec's drafts, which read fewer bits of each instead."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.plan import DraftCodes, KVCache, KVFormat, Plan, Speculation, Weights, Workload
from ridgeplan.planner.policies.policy import Role, TokenSelection


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


ALL = TokenSelection(
    name="all",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    presets={
        "autoregressive": autoregressive,
        "int8": int8,
        "int4-weights": int4_weights,
        "quantspec": quantspec,
        "quantspec-kv": quantspec_kv,
        "quantspec-weights": quantspec_weights,
        "quantspec-exact": quantspec_exact,
    },
)
