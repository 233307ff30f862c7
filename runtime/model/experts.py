"""A layer's routed experts: their weights in every format, and the MLP that routes tokens to them.

Drafts route with the target's router, which no plan quantizes, on their own stream: a draft with 4-bit experts, or with
the upper planes of hierarchical ones, chooses by the same scores as the target, so it reads the same experts wherever
their streams agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import uses_gpu_kernel
from ridgeplan.kernels.experts import SWIGLU, Activation, expert_of, route, routed_mlp
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline.catalog.layers import Routing
from ridgeplan.runtime.model.linear import Dense, GatedMLP, Int4, Int8, Linear, Mxfp4


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """One projection of `count` experts in a single weight: the outputs of each expert after those of the one before.

    layer: without a bias. bias: [count, outputs] or None.
    """

    layer: Dense | Int4 | Int8 | Mxfp4
    count: int
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> StackedExperts:
        """A dense weight [experts, outputs, inputs]."""
        return cls(Dense(weight.flatten(0, 1)), len(weight), bias)

    @property
    def weight(self) -> Tensor | Int4Weight | Int8Weight | Mxfp4Weight:
        """The stack as the kernels take it."""
        weight = self.layer.weight
        if isinstance(weight, Tensor):
            return weight.unflatten(0, (self.count, -1))
        assert isinstance(weight, Int4Weight | Int8Weight | Mxfp4Weight), "a CPU's layouts have no stacks"
        return weight

    @property
    def projections(self) -> tuple[Linear, ...]:
        """All experts in one layer."""
        return (self.layer,)

    def __getitem__(self, expert: int) -> Linear:
        bias, weight = None if self.bias is None else self.bias[expert], self.weight
        if isinstance(weight, Tensor):
            return Dense(weight[expert], bias)
        single = expert_of(weight, expert, self.count)
        if isinstance(single, Mxfp4Weight):
            return Mxfp4(single, bias)
        if isinstance(single, Int4Weight):
            return Int4(single, bias)
        return Int8(single, bias, isinstance(self.layer, Int8) and self.layer.hierarchical)

    def with_projections(self, change: Callable[[Linear], Linear]) -> Experts:
        """Dense experts change one by one, for a fit to the tokens that each sees; codes as one layer, in place."""
        if isinstance(self.layer, Dense):
            return joined(change(self[expert]) for expert in range(self.count))
        layer = change(self.layer)
        assert isinstance(layer, Dense | Int4 | Int8 | Mxfp4), "a format of stacks"
        return StackedExperts(layer, self.count, self.bias)


@dataclass(frozen=True, eq=False)
class ListedExperts:
    """One projection of several experts as layers of their own: a CPU's quantized layouts, and recorders."""

    layers: tuple[Linear, ...]

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The experts' layers."""
        return self.layers

    def __getitem__(self, expert: int) -> Linear:
        return self.layers[expert]

    def with_projections(self, change: Callable[[Linear], Linear]) -> Experts:
        """`change` applied to each expert."""
        return joined(map(change, self.layers))


Experts = StackedExperts | ListedExperts


def joined(layers: Iterator[Linear]) -> Experts:
    """Experts of these layers, stacked where all are codes in the layout of GPUs."""
    each = tuple(layers)
    weights = [layer.weight for layer in each if isinstance(layer, Int4 | Int8)]
    if len(weights) < len(each):
        return ListedExperts(each)
    bias = [layer.bias for layer in each if isinstance(layer, Int4 | Int8) and layer.bias is not None]
    bias_rows = torch.stack(bias) if bias else None
    four = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if len(four) == len(each):
        return StackedExperts(Int4(_joined(four)), len(each), bias_rows)
    eight = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(eight) == len(each):
        both = Int8Weight(*(_joined([weight.planes[plane] for weight in eight]) for plane in (0, 1)))
        hierarchical = isinstance(each[0], Int8) and each[0].hierarchical
        return StackedExperts(Int8(both, hierarchical=hierarchical), len(each), bias_rows)
    return ListedExperts(each)


def _joined(weights: list[Int4Weight]) -> Int4Weight:
    first = weights[0]
    packed = torch.cat([weight.packed for weight in weights])
    return Int4Weight(packed, first.group, first.inputs, first.outputs * len(weights))


@dataclass(frozen=True, eq=False)
class RoutedMLP:
    """The weighted sum of the experts that a router chooses for each token, with shared experts if there are any.

    router: [experts, hidden] in full precision; router_bias: of its logits; choice_bias: float32 [experts], of the
    scores in the choice only. shared_gate: [1, hidden], of a sigmoid that scales the shared experts.
    """

    router: Tensor
    routing: Routing
    gate_up: Experts
    down: Experts
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: GatedMLP | None = None
    shared_gate: Tensor | None = None
    activation: Activation = SWIGLU

    def __call__(self, x: Tensor, prompt: bool = False) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(rows)
        return self.weighted_sum(rows, chosen, weights, self._shared(rows), prompt).view(x.shape)

    def weighted_sum(
        self, rows: Tensor, chosen: Tensor, weights: Tensor, addend: Tensor | None = None, prompt: bool = False
    ) -> Tensor:
        """The experts `chosen` for rows [rows, hidden] by their `weights` [rows, per_token], and `addend`."""
        gate_up, down = self.gate_up, self.down
        if uses_gpu_kernel("auto", rows) and isinstance(gate_up, StackedExperts) and isinstance(down, StackedExperts):
            return routed_mlp(
                rows, chosen, weights, gate_up.weight, down.weight, len(self.router), gate_up_bias=gate_up.bias,
                down_bias=down.bias, activation=self.activation, addend=addend, prompt=prompt,
            )  # fmt: skip
        out = torch.zeros_like(rows) if addend is None else addend.clone()
        # A CPU, where reading which experts are hit costs nothing, or a fit, which records each expert's inputs.
        for expert in chosen.unique().tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            update = self._expert(expert, rows[row]) * weights[row, place, None]
            out.index_add_(0, row, update.to(out.dtype))
        return out

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights [rows, per_token] of rows [rows, hidden], by logits in float32."""
        if rows.is_cuda and rows.dtype != torch.float32:
            logits = torch.mm(rows, self.router.t(), out_dtype=torch.float32)
        else:
            logits = functional.linear(rows.float(), self.router.float())
        logits = logits if self.router_bias is None else logits + self.router_bias
        return route(logits, self.routing, self.choice_bias)

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        if self.activation == SWIGLU:
            return self.down[expert](self.gate_up[expert](rows, gated=True))
        return self.down[expert](self.activation(self.gate_up[expert](rows)).to(rows.dtype))

    def _shared(self, rows: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        out = self.shared(rows)
        return out if self.shared_gate is None else out * functional.linear(rows, self.shared_gate).sigmoid()

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize: all but the router's."""
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down)
        return (*self.gate_up.projections, *self.down.projections, *shared)

    def with_projections(self, change: Callable[[Linear], Linear]) -> RoutedMLP:
        """The same MLP with `change` applied to each projection, the experts' one by one."""
        shared = None if self.shared is None else self.shared.with_projections(change)
        return RoutedMLP(
            self.router, self.routing, self.gate_up.with_projections(change), self.down.with_projections(change),
            self.router_bias, self.choice_bias, shared, self.shared_gate, self.activation,
        )  # fmt: skip
