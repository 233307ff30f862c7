"""Every token is read: plain decoding, and QuantSpec, whose drafts save bits instead of tokens."""

from __future__ import annotations

from ridgeplan.planner.plan import KVCache, KVFormat, Plan, Weights, Workload
from ridgeplan.planner.policies.policy import Role, TokenSelection
from ridgeplan.planner.policies.selection.quantspec import (
    quantspec,
    quantspec_exact,
    quantspec_int4,
    quantspec_int8,
    quantspec_kv,
    quantspec_weights,
)


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
