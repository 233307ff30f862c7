"""GPTQ with refitted grids, and coordinate descent over the codes of a row.

The squared error of an output is e^T H e, with e the rounding errors of a row and H = E[x x^T] the Hessian of that
error, the second moment of the layer's inputs. The method depends on what is known of H:

    H's diagonal   weights the fit of each group's scale and zero; codes are rounded to nearest
    H              the same fit, then GPTQ: the columns after a rounded column compensate its error

Source: GPTQ (Frantar et al. 2023, arXiv 2210.17323, equations 2 and 3), which equals LDLQ (QuIP, Chee et al. 2023).
The diagonal is robust. The full Hessian is better if the calibration text resembles the text to decode. Experiments are
in docs/kernels/gptq.md.

A hierarchical 8-bit weight is the sum of two 4-bit weights; the second stores the residual of the first. Compensation
enlarges that residual, so upper codes stay within `REACH` steps of the weights' own values. After GPTQ, coordinate
descent (`QuantizedRows`) improves both planes: every input then compensates the errors of all others.

Source: QuantEase (Behdin et al. 2023, arXiv 2309.01885, algorithm 1). Within a group its steps are GPTQ's rounding with
another feedback, so that both run in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.linear.gptq_round import gptq_round

SINGULAR = 1e-6  # a group keeps its grid if the relative determinant of its fit is below this


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
        self.middle = _middle(self.top)
        scale, zero = (pair.repeat_interleave(self.group, 1) for pair in (self.scale, self.zero))
        self.gradient = ((self.codes - self.middle) * scale + zero - self.weight) @ self.hessian

    def steps(self) -> Tensor:
        """The weight in units of codes, before rounding [outputs, inputs]."""
        grouped = self.weight.unflatten(1, (-1, self.group))
        return _steps(grouped, self.scale[..., None], self.zero[..., None], self.top).flatten(1)

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
        block = self.hessian[inside, inside]
        below = (block / block.diagonal()).triu(1).T
        solved = torch.linalg.solve_triangular(
            below + torch.eye(self.group, device=block.device), below, upper=False, unitriangular=True
        )
        scale = self.scale[:, index, None]
        step = -self.gradient[:, inside] / (_divisor(scale) * block.diagonal())
        steps = self.codes[:, inside] + step - step @ solved.T
        codes, _ = gptq_round(steps, -solved.T, near, top_code=self.top)
        self._move(inside, (codes - self.codes[:, inside]) * scale)
        self.codes[:, inside] = codes

    def refit(self) -> None:
        """Fits every group's scale and zero anew, by least squares given all other groups."""
        for index in range(self.scale.shape[1]):
            self._refit_group(index, slice(index * self.group, (index + 1) * self.group))

    def _refit_group(self, index: int, inside: slice) -> None:
        codes, block = self.codes[:, inside] - self.middle, self.hessian[inside, inside]
        heavy = codes @ block
        square, cross, count = (heavy * codes).sum(1), heavy.sum(1), block.sum()
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


SHRINKS = (1.0, 0.92, 0.84, 0.76, 0.68)  # candidate ranges of the codes, as shares of the group's own range
REFITS = 2  # rounds of choosing codes and refitting the grid, starting from the best range
SWEEPS = 2  # rounds of coordinate descent
REACH = 0.75  # steps between a weight and its upper code, where the next code is not nearer
FLOOR = 1e-4  # added to each input's importance, relative to its group's mean
DAMPING = 0.1  # added to H's diagonal, relative to its mean over used inputs, as H comes from a short text
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}  # weights processed at once, for a CPU's cache or a GPU's memory


Parts = tuple[Tensor, Tensor, Tensor]  # codes, scale and zero, as `quantize_weight` returns them


def quantize_planes(weight: Tensor, group: int, hessian: Tensor | None = None) -> tuple[Parts, Parts]:
    """Upper and lower parts of a hierarchical weight; arguments, and each plane, as for `quantize_weight` in 4 bits.

    The sum of the planes is fitted to the weight, and the upper plane serves drafts by itself.
    """
    upper = quantize_weight(weight, group, hessian, sweeps=SWEEPS, bounded=True)
    return upper, quantize_weight(weight.float() - decoded(*upper), group, hessian, sweeps=SWEEPS)


def decoded(codes: Tensor, scale: Tensor, zero: Tensor, bits: int = 4) -> Tensor:
    """The weight of quantized parts, float32 [outputs, inputs]."""
    centred = codes.float().unflatten(1, (scale.shape[1], -1)) - (1 << bits - 1)
    return (centred * scale.unsqueeze(2) + zero.unsqueeze(2)).flatten(1)


def quantize_weight(
    weight: Tensor, group: int, hessian: Tensor | None = None, bits: int = 4, sweeps: int = 0, bounded: bool = False
) -> Parts:
    """Codes int16 [outputs, inputs] of 4 or 8 bits; scale, zero: bfloat16 values in float32 [outputs, inputs / group].

    weight: [outputs, inputs]. hessian: [inputs, inputs], its diagonal [inputs], or None if nothing is known. The middle
    of w = (code - middle) * scale + zero is 8 or 128. sweeps: of coordinate descent after GPTQ. bounded: each code is
    within `REACH` steps of its weight's own value.
    """
    top = (1 << bits) - 1
    importance = weight.new_ones(weight.shape[1]) if hessian is None else hessian
    known = None
    if importance.dim() == 2:
        known = _Known.of(importance)
        importance = importance.diagonal()
    importance = importance.float().unflatten(0, (-1, group))
    rows = max(1, CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
    parts = [
        _to_nearest(chunk, importance, top) if known is None else _gptq(chunk, importance, known, top, sweeps, bounded)
        for chunk in weight.split(rows)
    ]
    codes, scale, zero = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes, scale, zero


def _to_nearest(weight: Tensor, importance: Tensor, top: int) -> Parts:
    grouped = weight.float().unflatten(1, importance.shape)
    scale, zero = _grid(grouped, importance, top)
    codes = _steps(grouped, scale, zero, top).round_().clamp_(0, top)
    return codes.flatten(1).to(torch.int16), scale.squeeze(2), zero.squeeze(2)


def _gptq_order(weight: Tensor, importance: Tensor, feedback: Tensor, top: int, bounded: bool) -> Parts:
    """Rounds column by column; `rest` holds the remaining columns, corrected for the errors so far.

    Grids are fitted to the corrected columns or, if bounded, to the weights themselves.
    """
    rest = weight.to(torch.float32, copy=True)
    codes, pairs = torch.empty_like(weight, dtype=torch.int16), []
    group = importance.shape[1]
    for index, start in enumerate(range(0, weight.shape[1], group)):
        inside, after = slice(start, start + group), slice(start + group, None)
        fitted = weight[:, inside].float() if bounded else rest[:, inside]
        scale, zero = (pair[:, 0] for pair in _grid(fitted[:, None], importance[None, index], top))
        near = _near(_steps(fitted, scale, zero, top)) if bounded else None
        steps = _steps(rest[:, inside], scale, zero, top)
        rounded, errors = gptq_round(steps, feedback[inside, inside], near, top_code=top)
        rest[:, after].addmm_(errors.mul_(scale), feedback[inside, after], alpha=-1)
        codes[:, inside] = rounded
        pairs.append((scale, zero))
    scale, zero = (torch.cat(column, dim=1) for column in zip(*pairs, strict=True))
    return codes, scale, zero


def _near(steps: Tensor) -> Tensor:
    """`steps`, rounded to the nearest code wherever no other code is within `REACH`."""
    nearest = steps.round()
    return torch.where((steps - nearest).abs() < 1 - REACH, nearest, steps)


def _gptq(weight: Tensor, importance: Tensor, known: _Known, top: int, sweeps: int, bounded: bool) -> Parts:
    """GPTQ, and as many `sweeps` of coordinate descent on grids and codes."""
    codes, scale, zero = _gptq_order(weight, importance, known.feedback, top, bounded)
    if not sweeps:
        return codes, scale, zero
    rows = QuantizedRows(weight.float(), codes.float(), scale, zero, known.hessian, top)
    for _ in range(sweeps):
        rows.refit()
        rows.sweep(_near(rows.steps()) if bounded else None)
    return rows.codes.to(torch.int16), scale, zero


class _Known(NamedTuple):
    """The damped Hessian [inputs, inputs], and GPTQ's feedback, which follows from it."""

    hessian: Tensor
    feedback: Tensor

    @classmethod
    def of(cls, hessian: Tensor) -> _Known:
        damped = hessian.float().clone()
        diagonal = damped.diagonal()
        used = diagonal.count_nonzero().clamp(min=1)
        diagonal += DAMPING * diagonal.sum() / used + torch.finfo(torch.float32).tiny
        return cls(damped, _feedback(damped))


def _feedback(damped: Tensor) -> Tensor:
    """Upper triangle with a unit diagonal [inputs, inputs]: how an error at one column corrects each later one.

    With H = R R^T, R upper triangular, the inverse of H is U^T U with U = R^-1: GPTQ's Cholesky factor.
    """
    # torch's factor is a lower triangle; reversing the order of the inputs gives the upper one.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    inverse = torch.linalg.solve_triangular(upper, torch.eye(len(upper), device=upper.device), upper=True)
    return inverse / inverse.diagonal()[:, None]


def _grid(grouped: Tensor, importance: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, bfloat16 values [outputs, groups, 1] of weights [outputs, groups, group].

    For each candidate range, the grid is fitted to its codes by least squares with weights `importance` [groups,
    group]. From the best fit, codes are chosen anew and the grid is fitted to them again.
    """
    importance = importance / importance.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) + FLOOR
    importance = importance / importance.sum(1, keepdim=True)
    mean = (grouped * importance).sum(2, keepdim=True)
    centred = grouped - mean
    low, high = centred.amin(2, keepdim=True), centred.amax(2, keepdim=True)
    middle, step = (low + high) / 2, (high - low) / top
    best = _fit(centred, importance, step, middle + step / 2, top)
    for shrink in SHRINKS[1:]:
        best = _better(best, _fit(centred, importance, step * shrink, middle + step * shrink / 2, top))
    for _ in range(REFITS):
        best = _better(best, _fit(centred, importance, best.scale, best.zero, top))
    return best.scale.bfloat16().float(), (best.zero + mean).bfloat16().float()


class _Fit(NamedTuple):
    """A grid, and the share of the weights' weighted variance that it explains: [outputs, groups, 1]."""

    scale: Tensor
    zero: Tensor
    explained: Tensor


def _fit(centred: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, top: int) -> _Fit:
    """The least-squares grid for the codes that rounding with (scale, zero) gives."""
    codes = _steps(centred, scale, zero, top).round_().clamp_(0, top).sub_(_middle(top))
    weighted = codes * importance
    mean = weighted.sum(2, keepdim=True)
    variance = codes.mul_(weighted).sum(2, keepdim=True) - mean.square()
    covariance = weighted.mul_(centred).sum(2, keepdim=True)
    fitted = torch.where(variance > 0, covariance / variance, 0.0)
    return _Fit(fitted, -fitted * mean, fitted * covariance)


def _better(fit: _Fit, other: _Fit) -> _Fit:
    improved = other.explained > fit.explained
    return _Fit(*(torch.where(improved, new, old) for old, new in zip(fit, other, strict=True)))


def _steps(weight: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """Weights in units of codes, before rounding; a constant group has scale 0 and decodes to its zero."""
    return (weight - zero).div_(_divisor(scale)).add_(_middle(top))


def _middle(top: int) -> int:
    """The code that stands for a group's zero."""
    return (top + 1) // 2
