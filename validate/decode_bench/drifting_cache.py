"""A cache whose steps choose as much anew as they are told to.

How many tokens a step chooses that the last one had not decides what is loaded from the host. Random weights know
nothing of it, so it is set: the policy chooses as always, and as many other tokens are loaded and read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.plan import Plan
from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.offload.slot_loader import Choice, LoadsAhead
from ridgeplan.validate.random_rounds import RandomModel, fill


def chosen_tokens(plan: Plan) -> int:
    """Tokens that a step chooses at the plan's context; the rest of its budget are recent ones."""
    context, group = plan.workload.context, plan.kv.group
    return plan.attention.budget - (context - quantized_groups(context, group) * group)


class DriftingCache(Cache):
    """Of layers on the host, a step reads a run of tokens, or pages, of a random order, and the next one a later run.

    It is filled with random prompts of the plan's context. All layers choose alike, once a pass of one query.
    """

    def __init__(self, model: RandomModel, plan: Plan) -> None:
        super().__init__(model.shape, model.cache_config(plan), model.device, model.weights.embedding.dtype)
        fill(self, plan.workload.context)
        self._old_tokens = quantized_groups(plan.workload.context, self.config.group) * self.config.group
        self._read = chosen_tokens(plan)
        self._orders: dict[tuple[int, int, int], Run] = {}
        self._moves = torch.zeros(1, dtype=torch.int64, device=self.lengths.device)
        self._chosen: Tensor | None = None

    def drift(self, units: int) -> None:
        """From now on each step chooses so many tokens, or pages, that the one before had not."""
        self._moves.fill_(units)

    def load_chosen(self, layer: int, choice: Choice, ahead: LoadsAhead | None = None) -> Tensor:
        if layer >= self.first_on_host and ahead is None:
            choice = self._other(layer, choice)
        return super().load_chosen(layer, choice, ahead)

    def begin_loading(self, choose: Callable[[int], Choice], alike: bool) -> LoadsAhead | None:
        return super().begin_loading(lambda layer: self._other(layer, choose(layer)), alike)

    def _other(self, layer: int, choice: Choice) -> Choice:
        index, count, page = choice
        if layer == self.first_on_host:
            self._chosen = self._run(index.shape[1], index.shape[2], page).next(self._moves)
        assert self._chosen is not None, "layers come in order"
        return self._chosen[: len(index)], count, page

    def _run(self, sets: int, width: int, page: int) -> Run:
        kind = sets, width, page
        if kind not in self._orders:
            sizes, device = (self.config.batch, sets, self._old_tokens // page), self.lengths.device
            with torch.inference_mode(False):  # it outlives this pass
                drawn = torch.rand(sizes, generator=torch.Generator(device).manual_seed(0), device=device)
                self._orders[kind] = Run(
                    drawn.argsort(-1).int(), torch.arange(width, device=device), self._read // page
                )
        return self._orders[kind]


@dataclass(frozen=True, eq=False)
class Run:
    """order: the old units of every row and set in random order, int32 [batch, sets, units]. places: int64 [width], of
    those that are chosen, of which the first `read` are read.
    """

    order: Tensor
    places: Tensor
    read: int

    def next(self, moves: Tensor) -> Tensor:
        """The units of the next step, int32 [batch, sets, width], `moves` places further; int64 [1].

        Those that are read ascend, as choices do, so that what lies together is loaded together.
        """
        self.places.add_(moves).remainder_(self.order.shape[2])
        units = self.order.index_select(2, self.places)
        return torch.cat([units[..., : self.read].sort(-1).values, units[..., self.read :]], dim=-1)
