"""How Triton kernels start early: the counterpart of `ridgeplan.kernels.device.launch` for CUDA C++."""

import triton
import triton.language as tl


@triton.jit
def pdl_launch_dependents_and_wait(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the ones before have ended: first thing in a kernel.

    EARLY and the option launch_pdl come from `ridgeplan.kernels.device.launch.pdl_options`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
