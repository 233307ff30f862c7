"""A machine of round numbers, on which times can be worked out by hand."""

import pytest

from ridgeplan.roofline.latency import KERNEL_CLASSES, Machine, RateTerms


@pytest.fixture(scope="session")
def ideal() -> Machine:
    """1 TB/s and 1 PFLOP/s, reached in full; nothing takes time to launch or to dispatch."""
    return Machine(
        memory_bytes=80e9,
        element_bytes=2,
        num_sms=132,
        bandwidth_bytes_per_s=1e12,
        compute_flops=1e15,
        host_link_bytes_per_s=1e10,
        rates=dict.fromkeys(KERNEL_CLASSES, RateTerms(1.0, 1.0, 0.0)),
        pass_dispatch_s=0.0,
        layer_dispatch_s=0.0,
        prefill_layer_dispatch_s=0.0,
        decode_gemm_rows=16,
        fused_swiglu_rows=8,
    )
