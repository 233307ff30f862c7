"""Calls of routed experts' products for few rows, with 4-bit, 8-bit and 16-bit weights, and with those in MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.experts import ExpertWeight, route, routed_mlp, routed_mlp_cost, routed_mlp_reference
from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear.weights import MXFP4_GROUP, Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline.catalog.layers import Routing
from ridgeplan.roofline.execution import fitting_group
from ridgeplan.roofline.ops import read_experts
from ridgeplan.validate.kernel_calls.case import BenchCase, Call, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, ExpertSize
from ridgeplan.validate.kernel_calls.vllm_peers import marlin_experts, prepared, triton_experts
from ridgeplan.validate.timing import Bench, KernelCall

GROUPED, TRITON = "torch grouped_mm", "ours in Triton"
MARLIN_TYPES = {Int4Weight: "uint4b8", Int8Weight: "uint8b128", Mxfp4Weight: "float4_e2m1f"}
ROUTINGS = 16  # different choices of experts that calls rotate over
STEP = 0.01  # size of a code's step, so that weights are about as large as a model's


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Both weights of a layer's experts, and rows with several choices of experts, so that other experts are hit.

    gate_up, down: as `routed_mlp` takes them. x: [rows, hidden]; chosen, weights: [ROUTINGS, rows, per_token].
    """

    size: ExpertSize
    gate_up: ExpertWeight
    down: ExpertWeight
    x: Tensor
    chosen: Tensor
    weights: Tensor
    backend: Backend = "auto"

    @classmethod
    def draw(cls, bench: Bench, bits: int, size: ExpertSize, rows: int, *, mxfp4: bool = False) -> RoutedExperts:
        """Random experts in a format, and uniform routing."""
        experts, sizes = size.experts, ((2 * size.intermediate, size.hidden), (size.hidden, size.intermediate))
        draw_weight = _mxfp4 if mxfp4 else partial(_weight, bits=bits)
        gate_up, down = (draw_weight(bench, experts, *each) for each in sizes)
        logits = torch.randn(ROUTINGS * rows, experts, device=bench.device)
        chosen, weights = route(logits, Routing(per_token=size.per_token))
        pairs = (each.unflatten(0, (ROUTINGS, rows)) for each in (chosen, weights))
        return cls(size, gate_up, down, fresh(bench, rows, size.hidden), *pairs)

    def call(self) -> KernelCall:
        """The experts' products. Peers are torch's grouped products of 16 bits, of codes ours in Triton, and vLLM's."""
        size, rows = self.size, len(self.x)
        params = 3 * size.hidden * size.intermediate
        cost = routed_mlp_cost(self.x, size.per_token, size.experts, params, self.weight_bytes / size.experts / params)
        outputs = float(read_experts(size.experts, size.per_token, rows)) * params / size.hidden  # as in a pass's costs
        name = f"{rows} x {size.hidden}, {size.per_token} of {size.experts} x {size.intermediate}"
        return KernelCall(
            "grouped_linear", name, cost, self.run, ROUTINGS, rows, outputs, size.hidden, self.error, self._peers()
        )

    def _peers(self) -> dict[str, Call]:
        routed = self.weights, self.chosen
        if isinstance(self.gate_up, Tensor):
            fused = prepared(triton_experts, self.x, self.gate_up, self.down, *routed)
            return {GROUPED: self.grouped, "vLLM Triton": fused}
        marlin = prepared(marlin_experts, self.x, self.size, MARLIN_TYPES[type(self.gate_up)], *routed)
        return {TRITON: replace(self, backend="triton").run, "vLLM Marlin": marlin}

    @property
    def weight_bytes(self) -> int:
        """Storage of both weights."""
        return sum(each.nbytes if isinstance(each, Tensor) else each.bytes for each in (self.gate_up, self.down))

    def run(self, i: int) -> Tensor:
        """The products of choice `i`."""
        routed = self.x, self.chosen[i], self.weights[i], self.gate_up, self.down, self.size.experts
        return routed_mlp(*routed, backend=self.backend)

    def error(self) -> float:
        """Against the reference in float32."""
        routed = self.x.float(), self.chosen[0], self.weights[0], self.gate_up, self.down, self.size.experts
        return relative_error(self.run(0), routed_mlp_reference(*routed))

    def grouped(self, i: int) -> Tensor:
        """torch's grouped products of rows in the order of their experts."""
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor)
        ids, per_token = self.chosen[i].flatten(), self.size.per_token
        order = ids.argsort()
        hits = torch.zeros(self.size.experts, dtype=torch.int32, device=ids.device)
        ends = hits.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        rows = order // per_token
        hidden = swiglu(functional.grouped_mm(self.x[rows], self.gate_up.mT, offs=ends))
        parts = functional.grouped_mm(hidden, self.down.mT, offs=ends) * self.weights[i].flatten()[order, None]
        return torch.zeros_like(self.x).index_add_(0, rows, parts.to(self.x.dtype))


def _weight(bench: Bench, experts: int, outputs: int, inputs: int, bits: int) -> ExpertWeight:
    """Random experts; codes of one expert, packed once, are repeated, as packing is slow."""
    if bits == 16:
        return STEP * fresh(bench, experts, outputs, inputs)
    levels = 1 << bits
    codes = torch.randint(levels, (outputs, inputs), dtype=torch.int32, device=bench.device)
    group = fitting_group(inputs, GROUP)
    assert group is not None, "inputs in groups of 32"
    scale, zero = STEP * 16 / levels * fresh(bench, 2, outputs, inputs // group)
    packed = (Int4Weight if bits == 4 else Int8Weight).pack(codes, scale, zero)
    stacks = [
        Int4Weight(plane.packed.repeat(experts, 1, 1), plane.group, inputs, experts * outputs)
        for plane in packed.planes
    ]
    return stacks[0] if bits == 4 else Int8Weight(*stacks)


def _mxfp4(bench: Bench, experts: int, outputs: int, inputs: int) -> Mxfp4Weight:
    shapes = (experts * outputs, inputs // 2), (experts * outputs, inputs // MXFP4_GROUP)
    ranges = (0, 256), (118, 122)  # numbers about as large as the steps of codes
    parts = (
        torch.randint(*each, shape, dtype=torch.uint8, device=bench.device)
        for shape, each in zip(shapes, ranges, strict=True)
    )
    return Mxfp4Weight(*parts)


def _experts_cases(
    kernel: str, bits: int, bench: Bench, sizes: Iterable[ExpertSize], mxfp4: bool = False
) -> Iterator[BenchCase]:
    for size in sizes:
        for rows, speedup in size.speedups:
            call = RoutedExperts.draw(bench, bits, size, rows, mxfp4=mxfp4).call()
            yield BenchCase(kernel, call, SpeedUp(speedup))


experts_dense_cases = partial(_experts_cases, "experts_dense", 16)
experts_int8_cases = partial(_experts_cases, "experts_int8", 8)
experts_int4_cases = partial(_experts_cases, "experts_int4", 4)
experts_mxfp4_cases = partial(_experts_cases, "experts_mxfp4", 4, mxfp4=True)
