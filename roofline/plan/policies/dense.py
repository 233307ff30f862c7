"""Presets whose steps read every token: plain decoding, and QuantSpec."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Drafter,
    DrafterKind,
    KVCache,
    KVFormat,
    Plan,
    Speculation,
    Weights,
    Workload,
)


def autoregressive(workload: Workload) -> Plan:
    """Plain decoding in full precision, the baseline of speed-ups."""
    return Plan(workload)


def plain_beside(plan: Plan) -> Plan:
    """Plain decoding that a plan is measured beside: on its stored weights where full precision may not fit, too."""
    return Plan(plan.workload, Weights(stored=plan.weights.stored))


def int8(workload: Workload) -> Plan:
    """Plain decoding on an INT8 KV cache: QuantSpec's target by itself."""
    return Plan(workload, kv=KVCache(KVFormat.INT8))


def int8_weights(workload: Workload) -> Plan:
    """Plain decoding with 8-bit target weights."""
    return Plan(workload, weights=Weights(target_bits=8, draft_bits=8))


def int8_weights_int8(workload: Workload) -> Plan:
    """Plain decoding with 8-bit target weights on an INT8 KV cache."""
    return replace(int8_weights(workload), kv=KVCache(KVFormat.INT8))


def int4_weights(workload: Workload) -> Plan:
    """Plain decoding with 4-bit target weights."""
    return Plan(workload, weights=Weights(target_bits=4, draft_bits=4))


def int4_weights_int8(workload: Workload) -> Plan:
    """Plain decoding with 4-bit target weights on an INT8 KV cache."""
    return replace(int4_weights(workload), kv=KVCache(KVFormat.INT8))


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


def suffix(workload: Workload) -> Plan:
    """Full precision, whose drafts are what followed the longest earlier occurrence of the text's suffix."""
    return Plan(workload, speculation=Speculation(4, drafter=Drafter(DrafterKind.SUFFIX, 4)))


def cascade(workload: Workload) -> Plan:
    """Suffix proposals that two 4-bit passes verify before the target of `quantspec-int8` does."""
    drafting = Speculation(8, DraftCodes.UPPER, drafter=Drafter(DrafterKind.SUFFIX, 4, 2))
    return replace(quantspec_int8(workload), speculation=drafting)


def adaptive_cascade(workload: Workload) -> Plan:
    """A cascade that adapts over all tiers: plain steps, 4-bit drafts, suffix proposals to either, 1 to 3 passes."""
    plan, drafter = cascade(workload), Drafter(DrafterKind.SUFFIX, 4, 3)
    return replace(plan, speculation=replace(plan.speculation, gamma=15, drafter=drafter, adaptive=True))


DENSE_PRESETS = {
    make.__name__.replace("_", "-"): make
    for make in (
        autoregressive, int8, int8_weights, int8_weights_int8, int4_weights, int4_weights_int8, quantspec, quantspec_kv,
        quantspec_weights, quantspec_exact, quantspec_int8, quantspec_int4, suffix, cascade,
        adaptive_cascade,
    )
}  # fmt: skip
