"""Codes of layers that leave the device while tokens are generated (SpeContext, Algorithm 2).

Layers on the device share one piece of memory: the fewer they are, the longer their rows may grow. So the thresholds of
Algorithm 1 are the lengths at which one layer fewer fits. The last layer leaves first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.residency.leading_copy import copy_leading
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.codes import CodedLayers
from ridgeplan.runtime.kv.config import KVCacheConfig

NAMES = tuple(item.name for item in fields(QuantizedKV))


@dataclass(frozen=True, eq=False)
class MovableCodes:
    """memory: of each tensor of the codes, [units, batch * kv_heads, ...], of which a layer takes as many units as its
    rows may have groups. away: what each of the last layers is while it lies on the host, the first of them first.
    """

    config: KVCacheConfig
    layers: int
    units: int
    memory: Mapping[str, Tensor]
    away: tuple[CodedLayers, ...]

    @classmethod
    def allocate(cls, model: ModelShape, config: KVCacheConfig, tokens: int, device: torch.device) -> MovableCodes:
        """Memory for the layers that never leave, of rows of up to `tokens` tokens, and what `config.spare_bytes` adds.

        Raises WorkloadError where the host lacks memory for the others.
        """
        away = tuple(CodedLayers.offloaded(model, config, tokens, device) for _ in range(config.host_layers))
        sizes = config.batch, model.kv_heads, 1, config.group, model.head_dim
        unit, groups = QuantizedKV.allocate(*sizes, "meta", lower=True), config.groups(tokens)
        spare_units = config.spare_bytes // unit.bytes
        units = min(model.layers * groups, (model.layers - config.host_layers) * groups + spare_units)

        def held(part: Tensor) -> Tensor:
            return torch.zeros(units * part.numel(), dtype=part.dtype, device=device)

        memory = {name: held(getattr(unit, name)) for name in NAMES}
        return cls(config, model.layers, units, memory, away)

    @property
    def staying(self) -> int:
        """Layers that never leave."""
        return self.layers - len(self.away)

    @property
    def bytes(self) -> int:
        """Device memory."""
        return sum(tensor.nbytes for tensor in self.memory.values())

    def capacity(self, resident: int) -> int:
        """Groups that rows may have while `resident` layers are on the device."""
        return min(self.most_groups, self.units // resident) if resident else self.most_groups

    @property
    def most_groups(self) -> int:
        """Groups that a row may ever have."""
        return self.config.groups(self.config.longest)

    def resident(self, groups: int) -> int:
        """The most layers that may be on the device with rows of up to `groups` groups, or as many as rows may have."""
        wanted = min(groups, self.most_groups)
        fitting = (count for count in range(self.layers, self.staying, -1) if self.capacity(count) >= wanted)
        return next(fitting, self.staying)

    def coded(self, resident: int) -> tuple[CodedLayers, ...]:
        """All layers, the first `resident` of them on the device."""
        near = [CodedLayers(self.config, resident, self.on_device(resident))] if resident else []
        return (*near, *self.away[resident - self.staying :])

    def on_device(self, resident: int) -> QuantizedKV:
        """The codes of the layers on the device, concatenated along the batch."""
        config, groups = self.config, max(1, self.capacity(resident))
        sizes = resident * config.batch, self.away[0].codes.kv_heads, groups, config.group, self.away[0].codes.head_dim
        template = QuantizedKV.allocate(*sizes, "meta", lower=True)
        shapes = {name: getattr(template, name).shape for name in NAMES}
        return QuantizedKV(**{name: self.memory[name][: shape.numel()].view(shape) for name, shape in shapes.items()})

    def leave(self, resident: int, groups: Tensor) -> None:
        """Copies the last of `resident` layers on the device to the host. groups: int32 [batch], that rows hold."""
        source, target = self._moving(resident)
        for name in NAMES:
            copy_leading(getattr(source, name), getattr(target.codes, name), groups)

    def catch_up(self, resident: int, since: Sequence[int], groups: Sequence[int]) -> None:
        """Copies what rows have gained since `leave`: from group since[row] up to groups[row]; fills the window."""
        source, target = self._moving(resident)
        for row, (first, last) in enumerate(zip(since, groups, strict=True)):
            for name in NAMES:
                getattr(target.codes, name)[row, :, first:last] = getattr(source, name)[row, :, first:last]
            if target.window:
                target.window.take(source, row, last)

    def spread(self, resident: int) -> None:
        """Moves the layers on the device apart once the last of `resident` has left: its memory is theirs.

        They move up, the last one first, so that none overwrites another that has not moved yet.
        """
        before, after, batch = self.on_device(resident), self.on_device(resident - 1), self.config.batch
        for name in NAMES:
            old, new = getattr(before, name), getattr(after, name)
            for row in reversed(range((resident - 1) * batch)):
                new[row, :, : old.shape[2]] = old[row].clone()

    def _moving(self, resident: int) -> tuple[QuantizedKV, CodedLayers]:
        """The last of `resident` layers on the device, and what it is on the host."""
        batch = self.config.batch
        rows = slice((resident - 1) * batch, resident * batch)
        return self.on_device(resident).rows(rows), self.away[resident - 1 - self.staying]
