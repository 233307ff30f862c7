"""The CUDA C++ kernel of routed experts' products for few rows (csrc/), compiled at first use and launched with PDL.

docs/kernels/experts.md explains how it works.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.cuda import KernelParams, compile_kernel, launch_with_pdl, program
from ridgeplan.kernels.experts import Activation, Blocks, ExpertWeight, expert_sizes, max_blocks
from ridgeplan.kernels.experts.schedule import (
    COLUMNS,
    MXFP4,
    PAIRS_PER_EXPERT,
    CodeFormat,
    ExpertsSchedule,
    make_experts_schedule,
    tiled_format,
)
from ridgeplan.kernels.linear.cuda import accepts, device_limits
from ridgeplan.kernels.linear.schedule import RESERVED_BYTES
from ridgeplan.kernels.linear.weights import Mxfp4Weight

SOURCE, ENTRY = "experts/csrc/experts.cu", "experts"
FALLBACK = "the CUDA kernel of routed experts does not compile, Triton's runs instead"
MAX_ROWS = 1024  # of which blocks can be counted
MAX_MXFP4_SCALE = 128  # up to which a scale over the offset of decoded numbers is finite in bfloat16


class ExpertsParams(KernelParams):
    """See csrc/experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "lower", "bias", "y", "experts", "block_pairs")),
        *((name, ctypes.c_int) for name in ("pairs", "per_row", "blocks", "block_rows", "inputs", "tiles", "stages")),
        *((name, ctypes.c_int) for name in ("x_buffers", "stages_before_x", "stages_after_x", "early_blocks")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "offset")),
    )


@dataclass(frozen=True)
class ExpertsKernel:
    """A compiled kernel, and the schedule of its product."""

    compiled: Any
    schedule: ExpertsSchedule

    def run(
        self,
        x: Tensor,
        blocks: Blocks,
        parts: tuple[Tensor, ...],
        bias: Tensor | None,
        pairs: int,
        activation: Activation,
        early_blocks: bool,
    ) -> Tensor:
        """Products of all pairs [pairs, outputs], of gated ones half as many outputs, in x's dtype.

        x: [rows, inputs], each row of the same number of pairs. parts: `weight_parts` of the weight. early_blocks: the
        kernel before this one waited for the kernel that wrote `blocks`, and then let this one start.
        """
        schedule = self.schedule
        width = schedule.outputs // (2 if schedule.gated else 1)
        y = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
        params = ExpertsParams(
            x=x, weight=parts[0], lower=parts[1] if len(parts) > 1 else None, bias=bias, y=y,
            experts=blocks.experts, block_pairs=blocks.pairs, pairs=pairs, per_row=pairs // len(x),
            blocks=schedule.blocks, block_rows=schedule.block_rows, inputs=schedule.inputs, tiles=schedule.expert_tiles,
            stages=schedule.stages, x_buffers=schedule.x_buffers, stages_before_x=schedule.stages_before_x,
            stages_after_x=schedule.stages_after_x, early_blocks=early_blocks,
            alpha=activation.alpha, limit=activation.limit, offset=activation.offset,
        )  # fmt: skip
        with torch.cuda.device(x.device):
            launch_with_pdl(
                self.compiled, (schedule.ctas, 1, 1), (schedule.threads, 1, 1), params, schedule.shared_bytes
            )
        return y


Kernels = tuple[ExpertsKernel, ExpertsKernel]  # of gate and up, and of down


def block_rows(rows: int) -> int:
    """Pairs of a block for `rows` rows, of which an expert is hit by each once at most: a power of two, up to 8."""
    return min(COLUMNS, 1 << (rows - 1).bit_length())


def weight_parts(weight: ExpertWeight) -> tuple[Tensor, ...]:
    """The tensors of a stack of codes: its planes, or codes and scales; none of a dense weight."""
    if isinstance(weight, Tensor):
        return ()
    return (weight.codes, weight.scales) if isinstance(weight, Mxfp4Weight) else tuple(p.packed for p in weight.planes)


def code_format(weight: ExpertWeight, bf16: bool) -> CodeFormat | None:
    """How the kernel reads a weight for x of this dtype; None if it does not."""
    parts = weight_parts(weight)
    if isinstance(weight, Tensor) or not all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts):
        return None
    if isinstance(weight, Mxfp4Weight):
        return MXFP4 if bf16 and weight.max_scale <= MAX_MXFP4_SCALE else None
    bits = 4 * len(weight.planes)
    return None if bits == 8 and weight.group > 128 and not bf16 else tiled_format(bits, weight.group)


def find_experts_kernels(
    x: Tensor, stacks: tuple[ExpertWeight, ExpertWeight], per_token: int, count: int
) -> Kernels | None:
    """The kernels for both products of x [rows, hidden], or None if Triton's must run.

    They need Hopper or newer, few rows of a 16-bit dtype (of MXFP4 bfloat16), and codes.
    """
    pairs = len(x) * per_token
    if not accepts(x, MAX_ROWS) or pairs > PAIRS_PER_EXPERT * count:
        return None
    device, rows, is_bf16 = x.device, block_rows(len(x)), x.dtype == torch.bfloat16
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernels = []
    for weight, gated in zip(stacks, (True, False), strict=True):
        weights = code_format(weight, is_bf16)
        if weights is None or weight_parts(weight)[0].device != device:
            return None
        schedule = make_experts_schedule(
            weights, is_bf16, *expert_sizes(weight, count), gated, max_blocks(pairs, count, rows), rows, num_sms,
            device_limits(device).sm_bytes,
        )  # fmt: skip
        compiled = schedule and _compiled(schedule.options, device)
        if schedule is None or compiled is None:
            return None
        kernels.append(ExpertsKernel(compiled, schedule))
    return kernels[0], kernels[1]


@cache
def _compiled(options: tuple[str, ...], device: torch.device) -> Any | None:
    """The kernel may use all of a CTA's shared memory."""
    shared_bytes = device_limits(device).sm_bytes - RESERVED_BYTES
    text = program(SOURCE, ExpertsParams)
    return compile_kernel(text, ENTRY, options, device, shared_bytes=shared_bytes, fallback=FALLBACK)


def expert_products(
    x: Tensor,
    blocks: Blocks,
    kernels: Kernels,
    stacks: tuple[ExpertWeight, ExpertWeight],
    biases: tuple[Tensor | None, Tensor | None],
    pairs: int,
    activation: Activation,
) -> Tensor:
    """Both products of all pairs, [pairs, hidden] in x's dtype; arguments as `ridgeplan.kernels.experts.routed_mlp`."""
    narrow = [None if bias is None else bias.to(x.dtype).contiguous() for bias in biases]
    hidden = kernels[0].run(x, blocks, weight_parts(stacks[0]), narrow[0], pairs, activation, early_blocks=False)
    return kernels[1].run(hidden, blocks, weight_parts(stacks[1]), narrow[1], pairs, activation, early_blocks=True)
