"""GPTQ's inner loop: rounds a group's weights input by input, passing each error on to later inputs."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel

TOP_CODE = 15


def gptq_round(
    steps: Tensor,
    feedback: Tensor,
    near: Tensor | None = None,
    *,
    top_code: int = TOP_CODE,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Codes 0..top_code and errors, float32 [outputs, group], of steps [outputs, group]: weights in units of the grid.

    Input i is rounded to nearest, ties to even; each later input j then moves by -feedback[i, j] times the error
    (GPTQ, Frantar et al. 2023, equations 2 and 3). feedback: float32 [group, group], read above its diagonal.
    near: float32 [outputs, group], the steps of the weights themselves; with it, a code is the floor or the ceiling of
    its own, as in AdaRound (Nagel et al. 2020, equation 21), so that no weight moves by more than a step.
    Raises ValueError when the shapes disagree.
    """
    if feedback.shape != (steps.shape[1], steps.shape[1]):
        raise ValueError(f"feedback {list(feedback.shape)} must be square, as wide as steps {list(steps.shape)}")
    if near is not None and near.shape != steps.shape:
        raise ValueError(f"near {list(near.shape)} must have the shape of steps {list(steps.shape)}")
    if not uses_gpu_kernel(backend, steps):
        return gptq_round_reference(steps, feedback, near, top_code)
    from ridgeplan.kernels.linear.triton import gptq_round_triton

    return gptq_round_triton(steps, feedback, near, top_code)


def gptq_round_reference(
    steps: Tensor, feedback: Tensor, near: Tensor | None = None, top_code: int = TOP_CODE
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    columns = steps.t().clone(memory_format=torch.contiguous_format)  # makes each input's weights contiguous
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    for index, column in enumerate(columns):
        torch.round(column, out=codes[index])
        if near is not None:
            codes[index].clamp_(near[:, index].floor(), near[:, index].ceil())
        codes[index].clamp_(0, top_code)
        torch.sub(column, codes[index], out=errors[index])
        columns[index + 1 :].addr_(feedback[index, index + 1 :], errors[index], alpha=-1)
    return codes.t(), errors.t()
