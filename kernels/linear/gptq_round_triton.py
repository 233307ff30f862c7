"""Triton kernel of GPTQ's rounding: a program holds a group of a few outputs and rounds its inputs in order.

One launch per group, where plain torch takes four per input: a quarter of a million for a layer of an 8B model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 16  # per program
# Adding and subtracting this rounds a number, ties to even, as float32 then has no bits left below 1.
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _round_kernel(
    steps,
    feedback,
    near,
    codes,
    errors,
    outputs,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    inputs = tl.arange(0, PADDED)
    inside = (output < outputs) & (inputs < GROUP)[None, :]
    at = output.to(tl.int64) * GROUP + inputs[None, :]
    rest = tl.load(steps + at, mask=inside, other=0.0)
    missed = tl.zeros_like(rest)
    if near is not None:
        whole = tl.load(near + at, mask=inside, other=0.0)
        least, most = tl.floor(whole), tl.ceil(whole)
    for i in range(GROUP):
        own = (inputs == i)[None, :]
        wanted = tl.sum(tl.where(own, rest, 0.0), 1, keep_dims=True)
        # Codes are clamped anyway, and the addition would not round very large numbers.
        code = (tl.minimum(tl.maximum(wanted, -16.0), 2.0 * TOP + 2.0) + ROUNDER) - ROUNDER
        if near is not None:
            code = tl.maximum(code, tl.sum(tl.where(own, least, 0.0), 1, keep_dims=True))
            code = tl.minimum(code, tl.sum(tl.where(own, most, 0.0), 1, keep_dims=True))
        code = tl.minimum(tl.maximum(code, 0.0), TOP * 1.0)
        error = wanted - code
        passed = tl.load(feedback + i * GROUP + inputs, mask=(inputs > i) & (inputs < GROUP), other=0.0)
        # A rounded input keeps its code, as no further error is passed to it.
        rest = tl.where(own, code, rest - error * passed[None, :])
        missed = tl.where(own, error, missed)
    tl.store(codes + at, rest, mask=inside)
    tl.store(errors + at, missed, mask=inside)


def gptq_round_triton(steps: Tensor, feedback: Tensor, near: Tensor | None, top_code: int) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.linear.gptq_round.gptq_round`."""
    steps = steps.contiguous()
    outputs, group = steps.shape
    codes, errors = torch.empty_like(steps), torch.empty_like(steps)
    _round_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        steps,
        feedback.contiguous(),
        None if near is None else near.contiguous(),
        codes,
        errors,
        outputs,
        TOP=top_code,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        OUTPUTS=OUTPUTS,
        num_warps=4,
    )
    return codes, errors
