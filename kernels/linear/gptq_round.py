"""GPTQ's inner loop: rounds a group's weights input by input, passing each error on to later inputs."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline.cost import Cost

TOP_CODE = 15


def gptq_round(steps: Tensor, feedback: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Codes 0..15 and errors, float32 [outputs, group], of steps [outputs, group]: weights in units of the grid.

    Input i is rounded to nearest, ties to even; each later input j then moves by -feedback[i, j] times the error
    (GPTQ, Frantar et al. 2023, equations 2 and 3). feedback: float32 [group, group], read above its diagonal.
    Raises ValueError when the shapes disagree.
    """
    if feedback.shape != (steps.shape[1], steps.shape[1]):
        raise ValueError(f"feedback {list(feedback.shape)} must be square, as wide as steps {list(steps.shape)}")
    if not uses_gpu_kernel(backend, steps):
        return gptq_round_reference(steps, feedback)
    from ridgeplan.kernels.linear.gptq_round_triton import gptq_round_triton

    return gptq_round_triton(steps, feedback)


def gptq_round_reference(steps: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    columns = steps.t().clone(memory_format=torch.contiguous_format)  # makes each input's weights contiguous
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    for index, column in enumerate(columns):
        torch.round(column, out=codes[index]).clamp_(0, TOP_CODE)
        torch.sub(column, codes[index], out=errors[index])
        columns[index + 1 :].addr_(feedback[index, index + 1 :], errors[index], alpha=-1)
    return codes.t(), errors.t()


def gptq_round_cost(steps: Tensor) -> Cost:
    """Declared cost: `ridgeplan.roofline.ops.gptq_round` at this size."""
    outputs, group = steps.shape
    return Cost(
        flops=outputs * group * (group - 1) + 3 * steps.numel(),
        read_bytes=steps.nbytes + 4 * group * group,
        write_bytes=2 * steps.nbytes,
    )
