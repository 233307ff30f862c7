"""Device properties that determine memory use; `ridgeplan.roofline.latency.Machine` adds rates."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.cost import Term

GIB = 2**30  # bytes


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's memory, and the properties that buffer sizes depend on.

    memory_bytes: available to plans. element_bytes: of a full-precision element, 2 for bf16 on a GPU, 4 for fp32 on a
    CPU. num_sms: streaming multiprocessors, or cores of a CPU. asynchronous: 1 where the device works while the host
    launches more (a GPU), 0 where both are the same (a CPU).
    """

    memory_bytes: Term
    element_bytes: Term
    num_sms: Term
    asynchronous: Term = 1
