"""Routed experts of prompts, on Hopper: pairs sorted by expert, and torch's grouped products of them.

Codes become dense copies, of as many consecutive experts at a time as a bounded workspace holds. Only where that is not
all of them the host must know the pairs of each, and waits for the device.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.experts import Activation, ExpertWeight, expert_sizes, supports_grouped
from ridgeplan.kernels.experts.triton import activate, dequantize_rows, weighted_sum_triton
from ridgeplan.kernels.linear.weights import Mxfp4Weight
from ridgeplan.roofline.execution import EXPERT_COPY_BYTES, GROUPED_MXFP4_ROWS, GROUPED_ROWS


def takes_grouped(x: Tensor, weight: ExpertWeight, pairs: int, count: int) -> bool:
    """Whether `routed_mlp_grouped` is faster for a prompt's x [rows, hidden], with so many pairs of `count` experts."""
    least = GROUPED_MXFP4_ROWS if isinstance(weight, Mxfp4Weight) else GROUPED_ROWS
    return supports_grouped(x) and pairs >= least * count


def routed_mlp_grouped(
    x: Tensor, experts: Tensor, weights: Tensor, stacks: tuple[ExpertWeight, ExpertWeight],
    biases: tuple[Tensor | None, Tensor | None], count: int, activation: Activation, addend: Tensor | None,
    copy_bytes: int = EXPERT_COPY_BYTES,
) -> Tensor:  # fmt: skip
    """See `ridgeplan.kernels.experts.routed_mlp`; x in bfloat16. copy_bytes: most that dense copies take at once."""
    ids, order = experts.flatten().short().sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(ids), device=x.device))
    each = torch.arange(-1, count, dtype=ids.dtype, device=x.device)
    ends = torch.searchsorted(ids, each, right=True, out_int32=True)
    products = partial(_products, count=count, ends=ends, bounds=cache(ends.tolist), copy_bytes=copy_bytes)
    gated = x.new_empty(len(ids), expert_sizes(stacks[1], count)[1])
    for at, product in products(x[order // experts.shape[1]], stacks[0]):
        activate(product[None], activation, gated[at], biases[0], ids[at])
        del product
    pieces = [product for _, product in products(gated, stacks[1])]
    parts = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if biases[1] is not None:
        shares = torch.zeros(len(x), count, device=x.device).scatter_add_(1, experts, weights)
        addend = shares @ biases[1].float() + (0 if addend is None else addend)
    return weighted_sum_triton(parts[None], weights, addend, x.dtype, places)


def _products(
    rows: Tensor, weight: ExpertWeight, count: int, ends: Tensor, bounds: Callable[[], list[int]], copy_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """Products of rows in the order of their experts, some experts at a time: which rows, and [those, outputs].

    ends: int32 [1 + count], 0 and the row after each expert's last; bounds: the same on the host. copy_bytes: at least
    one expert is copied.
    """
    if isinstance(weight, Tensor):
        yield slice(0, len(rows)), functional.grouped_mm(rows, weight.mT, offs=ends[1:])
        return
    outputs, inputs = expert_sizes(weight, count)
    at_once = min(count, max(1, copy_bytes // (outputs * inputs * rows.element_size())))
    copies = rows.new_empty(at_once, outputs, inputs)
    for first in range(0, count, at_once):
        stop = min(count, first + at_once)
        at = slice(0, len(rows)) if at_once == count else slice(bounds()[first], bounds()[stop])
        if at.start < at.stop:
            dequantize_rows(weight, first * outputs, copies[: stop - first].flatten(0, 1))
            offsets = ends[first + 1 : stop + 1] - ends[first]
            yield at, functional.grouped_mm(rows[at], copies[: stop - first].mT, offs=offsets)
