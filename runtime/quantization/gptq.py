"""4-bit and 8-bit weights w = (code - middle) * scale + zero that minimize the error of a layer's outputs.

The squared error of an output is e^T H e, with e the rounding errors of a row and H = E[x x^T] the Hessian of that
error, the second moment of the layer's inputs. The method depends on what is known of H:

    H's diagonal   it weights the fit of each group's scale and zero; codes are rounded to nearest
    H              the same fit, and GPTQ: the error of each rounded column is compensated by the columns after it

Source: GPTQ (Frantar et al. 2023, arXiv 2210.17323, equations 2 and 3), the same as LDLQ (QuIP, Chee et al. 2023).
The diagonal is robust; the full Hessian is better if the calibration text resembles what is decoded. Experiments are in
docs/kernels/gptq.md.

Hierarchical 8-bit weights are a 4-bit weight and, as another 4-bit weight, what that lacks. What GPTQ compensates adds
to what is lacking, so upper codes are held next to the weights' own values: lower codes then span two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.linear.gptq_round import gptq_round

SHRINKS = (1.0, 0.92, 0.84, 0.76, 0.68)  # candidate ranges of the codes, as shares of the group's own range
REFITS = 2  # rounds of choosing codes and refitting the grid, starting from the best range
FLOOR = 1e-4  # added to each input's importance, relative to its group's mean
DAMPING = (
    0.1  # added to H's diagonal, relative to its mean over inputs that are ever used, as H comes from a short text
)
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}  # weights processed at once, for a CPU's cache or a GPU's memory


Parts = tuple[Tensor, Tensor, Tensor]  # codes, scale and zero, as `quantize_weight` returns them


def quantize_weight(weight: Tensor, group: int, hessian: Tensor | None = None, bits: int = 4) -> Parts:
    """Codes int16 [outputs, inputs] of 4 or 8 bits; scale, zero: bfloat16 values in float32 [outputs, inputs / group].

    weight: [outputs, inputs]. hessian: [inputs, inputs], its diagonal [inputs], or None if nothing is known. The middle
    of w = (code - middle) * scale + zero is 8 or 128.
    """
    return _quantize(weight, group, hessian, top=(1 << bits) - 1)


def quantize_planes(weight: Tensor, group: int, hessian: Tensor | None = None) -> tuple[Parts, Parts]:
    """Upper and lower parts of a hierarchical weight; arguments, and each plane, as for `quantize_weight` in 4 bits.

    The sum of the planes is fitted to the weight, and the upper plane serves drafts by itself.
    """
    upper = _quantize(weight, group, hessian, top=15, bounded=True)
    return upper, quantize_weight(weight.float() - decoded(*upper), group, hessian)


def decoded(codes: Tensor, scale: Tensor, zero: Tensor, bits: int = 4) -> Tensor:
    """The weight of quantized parts, float32 [outputs, inputs]."""
    centred = codes.float().unflatten(1, (scale.shape[1], -1)) - (1 << bits - 1)
    return (centred * scale.unsqueeze(2) + zero.unsqueeze(2)).flatten(1)


def _quantize(weight: Tensor, group: int, hessian: Tensor | None, top: int, bounded: bool = False) -> Parts:
    """`quantize_weight` to codes up to `top`; bounded: each next to its weight's own value."""
    importance = weight.new_ones(weight.shape[1]) if hessian is None else hessian
    feedback = None
    if importance.dim() == 2:
        feedback, importance = _feedback(importance), importance.diagonal()
    importance = importance.float().unflatten(0, (-1, group))
    rows = max(1, CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
    parts = [
        _to_nearest(chunk, importance, top)
        if feedback is None
        else _gptq_order(chunk, importance, feedback, top, bounded)
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

    Grids are fitted to the corrected columns or, if bounded, to the weights themselves, which must lie inside.
    """
    rest = weight.to(torch.float32, copy=True)
    codes, pairs = torch.empty_like(weight, dtype=torch.int16), []
    group = importance.shape[1]
    for index, start in enumerate(range(0, weight.shape[1], group)):
        inside, after = slice(start, start + group), slice(start + group, None)
        fitted = weight[:, inside].float() if bounded else rest[:, inside]
        scale, zero = (pair[:, 0] for pair in _grid(fitted[:, None], importance[None, index], top))
        near = _steps(fitted, scale, zero, top) if bounded else None
        steps = _steps(rest[:, inside], scale, zero, top)
        rounded, errors = gptq_round(steps, feedback[inside, inside], near, top_code=top)
        rest[:, after].addmm_(errors.mul_(scale), feedback[inside, after], alpha=-1)
        codes[:, inside] = rounded
        pairs.append((scale, zero))
    scale, zero = (torch.cat(column, dim=1) for column in zip(*pairs, strict=True))
    return codes, scale, zero


def _feedback(hessian: Tensor) -> Tensor:
    """Upper triangle with a unit diagonal [inputs, inputs]: how an error at one column corrects each later one.

    With H = R R^T, R upper triangular, the inverse of H is U^T U with U = R^-1: GPTQ's Cholesky factor.
    """
    damped = hessian.float().clone()
    diagonal = damped.diagonal()
    used = diagonal.count_nonzero().clamp(min=1)
    diagonal += DAMPING * diagonal.sum() / used + torch.finfo(torch.float32).tiny
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


def _better(one: _Fit, other: _Fit) -> _Fit:
    improved = other.explained > one.explained
    return _Fit(*(torch.where(improved, new, old) for old, new in zip(one, other, strict=True)))


def _steps(weight: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """Weights in units of codes, before rounding; a constant group has scale 0 and decodes to its zero."""
    return (weight - zero).div_(torch.where(scale == 0, 1.0, scale)).add_(_middle(top))


def _middle(top: int) -> int:
    """The code that stands for a group's zero."""
    return (top + 1) // 2
