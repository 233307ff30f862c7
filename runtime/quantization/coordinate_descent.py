"""Codes and grids of a quantized weight chosen anew, one after the other, given all others.

GPTQ makes up for an input's error by the inputs after it only; here every input makes up for all others. As there, the
squared error of an output is e^T H e, with e the rounding errors of a row and H the Hessian.

Source: QuantEase (Behdin et al. 2023, arXiv 2309.01885, algorithm 1). Within a group its steps are GPTQ's rounding with
another feedback (`_Sweep`), so that both run in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.linear.gptq_round import gptq_round

SINGULAR = 1e-6  # codes of a group as good as constant, whose grid is kept


@dataclass(eq=False)
class QuantizedRows:
    """Rows of a weight, their codes and grids, and the gradient of half their error.

    weight, codes, gradient: float32 [outputs, inputs]; scale, zero: bfloat16 values in float32 [outputs, groups];
    hessian: float32 [inputs, inputs], damped. Codes, scale and zero change in place. Codes go from 0 to `top`; the
    middle one, `middle`, stands for a group's zero.
    """

    weight: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    hessian: Tensor
    top: int

    def __post_init__(self) -> None:
        self.group = self.weight.shape[1] // self.scale.shape[1]
        self.middle = (self.top + 1) // 2
        scale, zero = (pair.repeat_interleave(self.group, 1) for pair in (self.scale, self.zero))
        self.gradient = ((self.codes - self.middle) * scale + zero - self.weight) @ self.hessian

    def steps(self) -> Tensor:
        """The weight in units of codes, before rounding [outputs, inputs]."""
        grouped = self.weight.unflatten(1, (-1, self.group)) - self.zero[..., None]
        return (grouped / _divisor(self.scale)[..., None] + self.middle).flatten(1)

    def sweep(self, near: Tensor | None = None) -> None:
        """Chooses every code anew, input by input. Without bounds the error never grows.

        near: [outputs, inputs], as for `gptq_round`: a code is the floor or the ceiling of its own.
        """
        for index in range(self.scale.shape[1]):
            inside = slice(index * self.group, (index + 1) * self.group)
            self._sweep_group(index, inside, None if near is None else near[:, inside])

    def _sweep_group(self, index: int, inside: slice, near: Tensor | None) -> None:
        """With t the best real codes, an input that changes its code by r moves the t of others by -r H_jk / H_kk.

        Until the inputs before k have changed, t_k - code_k is y_k; then it is x = y - L r, with L the part of H / H_kk
        below the diagonal and r = x - e, e being what rounding x leaves. So x = T y + T L e, with T = (1 + L)^-1, and
        this is what gptq_round computes for steps T y and the feedback -(T L)^T.
        """
        own = self.hessian[inside, inside]
        below = (own / own.diagonal()).triu(1).T
        solved = torch.linalg.solve_triangular(
            below + torch.eye(self.group, device=own.device), below, upper=False, unitriangular=True
        )
        scale = self.scale[:, index, None]
        wanted = -self.gradient[:, inside] / (_divisor(scale) * own.diagonal())
        steps = self.codes[:, inside] + wanted - wanted @ solved.T
        codes, _ = gptq_round(steps, -solved.T, near, top_code=self.top)
        self._move(inside, (codes - self.codes[:, inside]) * scale)
        self.codes[:, inside] = codes

    def refit(self) -> None:
        """Fits every group's scale and zero anew, by least squares given all other groups."""
        for index in range(self.scale.shape[1]):
            self._refit_group(index, slice(index * self.group, (index + 1) * self.group))

    def _refit_group(self, index: int, inside: slice) -> None:
        codes, own = self.codes[:, inside] - self.middle, self.hessian[inside, inside]
        heavy = codes @ own
        square, cross, count = (heavy * codes).sum(1), heavy.sum(1), own.sum()
        slope, shift = (self.gradient[:, inside] * codes).sum(1), self.gradient[:, inside].sum(1)
        determinant = square * count - cross.square()
        regular = determinant > SINGULAR * square * count
        determinant = torch.where(regular, determinant, torch.inf)
        scale = (self.scale[:, index] - (count * slope - cross * shift) / determinant).bfloat16().float()
        zero = (self.zero[:, index] - (square * shift - cross * slope) / determinant).bfloat16().float()
        moved = (scale - self.scale[:, index])[:, None] * codes + (zero - self.zero[:, index])[:, None]
        self._move(inside, moved)
        self.scale[:, index], self.zero[:, index] = scale, zero

    def _move(self, inside: slice, change: Tensor) -> None:
        self.gradient.addmm_(change, self.hessian[inside])


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: a constant group has scale 0, and any code stands for its zero."""
    return torch.where(scale == 0, 1.0, scale)
