"""Programmatic dependent launch in Triton kernels; `ridgeplan.kernels.device.launch` has the rules."""

import triton
import triton.language as tl


@triton.jit
def pdl_launch_dependents_and_wait(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until earlier ones have ended; called first in a kernel.

    `ridgeplan.kernels.device.launch.pdl_options` sets PDL and the option launch_pdl.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
