"""Declared costs of the sampling kernels, counted from the logits that they read.

Other traffic, a few numbers per row and chunk of some thousand tokens, is under a percent and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ridgeplan.roofline.cost import Cost

LOGIT_FLOPS = 5  # per logit read: difference, scaling, exponential, comparison and sum


def filter_cost(logits: Tensor) -> Cost:
    """`filter_logits` of [..., vocab], greedy or not, with or without top-k and top-p: logits are read once."""
    return Cost(LOGIT_FLOPS * logits.numel(), logits.nbytes)


def draw_cost(*logits: Tensor) -> Cost:
    """A draw for each row [rows, vocab] of one distribution, or of the residual of the first over the second."""
    return Cost(LOGIT_FLOPS * sum(x.numel() for x in logits), sum(x.nbytes for x in logits))


def filter_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of a kernel that reads all of `logits` once."""
    cost = filter_cost(args["logits"])
    return {"name": "filter_logits", "flops32": cost.flops, "bytes": cost.bytes}


def draw_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the kernel that sums weights, which reads only one of the drafts."""
    whole, drafts = args["target"][0], args["draft"][0]
    logits = whole.view(-1, args["GAMMA"] + 1, whole.shape[-1])[:, 0]
    cost = draw_cost(logits, *drafts[:1])
    return {"name": "draw", "flops32": cost.flops, "bytes": cost.bytes}
