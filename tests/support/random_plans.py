"""Random plans: every axis at any of its values that go together."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Eviction,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    Speculation,
    TargetAttention,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policy import EVICTIONS, SELECTIONS, TARGET_SELECTIONS, AllTokens


def degrees(*allowed: int) -> st.SearchStrategy[Parallel]:
    """Degrees of every kind of parallelism, experts on ranks of their own where there is more than one."""
    some = st.sampled_from(allowed)
    drawn = st.tuples(some, some, some, st.booleans())
    return drawn.map(lambda each: Parallel(*each[:3], expert=each[3] and each[0] * each[2] > 1))


@st.composite
def plans(draw: Any, workloads: st.SearchStrategy[Workload], parallel: st.SearchStrategy[Parallel]) -> Plan:
    """A plan for one of the workloads, divided as `parallel` says."""
    gamma = draw(st.integers(0, 15))
    kv = draw(st.sampled_from(KVFormat))
    upper = gamma > 0 and kv in (KVFormat.SHADOW, KVFormat.HIERARCHICAL) and draw(st.booleans())
    kinds = [kind for kind in SELECTIONS.values() if kv.quantized or not kind.needs_codes]
    kind = draw(st.sampled_from(kinds))
    sparse = {} if kind is AllTokens else {"ratio": draw(st.floats(1e-6, 1)), "sinks": draw(st.integers(0, 4096))}
    policy = draw(st.sampled_from(("none", *EVICTIONS)))
    chunked = policy != "none" and EVICTIONS[policy].chunked
    chunk = draw(st.sampled_from((0, 512, 4096))) if chunked else 0
    target = draw(
        st.sampled_from(
            [selection for selection in TARGET_SELECTIONS.values() if kv.quantized or not selection.needs_codes]
        )
    )
    offload, budget = draw(st.booleans()), draw(st.integers(1, 4096))
    bits = draw(st.sampled_from((4, 8, 16)))
    return Plan(
        replace(draw(workloads), parallel=draw(parallel)),
        Weights(bits, 4 if gamma and draw(st.booleans()) else bits, draw(st.sampled_from((32, 64, 128, 256)))),
        KVCache(kv),
        Eviction(policy, budget if policy != "none" else 0, chunk=chunk),
        Placement(offload, budget if offload else 0),
        TargetAttention(target(), budget if target is not AllTokens else 0),
        Speculation(gamma, DraftCodes.UPPER if upper else DraftCodes.FULL, kind(**sparse)),
    )
