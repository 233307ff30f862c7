"""Engines of a large shape that generate the same text as a small real model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.roofline.plan.plan import DrafterKind, Plan
from ridgeplan.roofline.plan.support import missing_head
from ridgeplan.runtime.engine import DraftParts, Engine
from ridgeplan.runtime.memory import MemoryMeter, readable_out_of_memory, require_memory
from ridgeplan.runtime.model.checkpoint import load_config, load_tokenizer, load_weights
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_target
from ridgeplan.runtime.retrieval.head import Head
from ridgeplan.runtime.speculation.draft_head import HeadCheckpoint
from ridgeplan.validate.acceptance import named_shape
from ridgeplan.validate.decode_bench.inflation import (
    ChannelMap,
    Inflater,
    InflationError,
    inflated_config,
    inflated_shape,
)


@dataclass(frozen=True, eq=False)
class InflatedModel:
    """A small model's function in a large shape, with the small one's context limit.

    hub: the small model's configuration. function: its shape, whose acceptance drafts have. targets: the large weights
    made last, by their format.
    """

    source: str
    hub: Any
    tokenizer: Any
    shape: ModelShape
    function: ModelShape
    device: torch.device
    targets: dict[tuple[int, int | None, bool, bool], DecoderWeights] = field(default_factory=dict)

    @classmethod
    def load(cls, model: str, shape: ModelShape, device: str = "cuda") -> InflatedModel:
        """`model`, as for `runtime.load`, inside `shape`; bfloat16 on CUDA, else float32.

        Raises ModelError, or InflationError if it does not fit into the shape, or the shape not into memory.
        """
        place = torch.device(device)
        source = model_source(model)
        hub = load_config(source)
        config = decoder_config(hub, source)
        limited = inflated_shape(config.shape, shape)
        ChannelMap(config, limited).check()
        inflated = cls(source, hub, load_tokenizer(source), limited, named_shape(model), place)
        _require_weight_memory(limited, place, inflated.dtype)
        return inflated

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @cached_property
    def text(self) -> CalibrationText:
        """What 4-bit weights are fitted to by default: a text of the small model itself."""
        config, small = self._small()
        return CalibrationText.of_model(Decoder(config, self.device), small)

    def config(self, yarn_factor: float) -> DecoderConfig:
        """The decoder, with RoPE scaled by YaRN."""
        return inflated_config(decoder_config(self.hub, self.source, yarn_factor), self.shape)

    def engine(
        self,
        plan: Plan,
        draft_weights: DecoderWeights | None = None,
        calibration: Sequence[int] | None = None,
        profile: Profile | None = None,
        make_head: Callable[[ModelShape, Tensor], Head] | None = None,
    ) -> Engine:
        """An engine of `plan`. draft_weights: those of another engine with the same draft format, by default quantized
        here. calibration: tokens to quantize for, by default `text`. profile: as for `ridgeplan.runtime.load`.
        make_head: makes a retrieval head for the shape and its embedding [vocab, hidden], for plans that choose by one.

        Raises WorkloadError if the plan does not fit into memory.
        """
        kind = plan.weights.target_format
        for other in self.targets.keys() - {kind}:
            del self.targets[other]
        held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        offloading = require_memory(plan, self.shape, self.device, self.dtype, held)
        with readable_out_of_memory(self.device):
            text = self._text(plan, calibration)
            if kind not in self.targets:
                self.targets[kind] = self._target(plan, text)
            weights = self.targets[kind]
            meter, config = MemoryMeter(self.device, weights.bytes), self.config(plan.workload.yarn_factor)
            head = make_head(self.shape, weights.embedding) if make_head and missing_head(plan) else None
            return Engine(
                plan, self.source, config, weights, self.device, meter,
                drafts=DraftParts(draft_weights, text, checkpoint=self._draft_head(plan)), profile=profile, head=head,
                offloaded=offloading,
            )  # fmt: skip

    def _draft_head(self, plan: Plan) -> HeadCheckpoint | None:
        """The small model's head in the shape, of a plan whose drafter is one."""
        if plan.speculation.drafter.kind is not DrafterKind.HEAD:
            return None
        config = decoder_config(self.hub, self.source)
        small = HeadCheckpoint.load(plan.workload.drafter_head, config.shape)
        return Inflater.build(config, self.shape, self.device).draft_head(small)

    def _text(self, plan: Plan, calibration: Sequence[int] | None) -> CalibrationText | None:
        if not plan.weights.quantized:
            return None
        return self.text if calibration is None else CalibrationText.from_tokens(calibration, self.shape.vocab)

    def _target(self, plan: Plan, text: CalibrationText | None) -> DecoderWeights:
        config, small = self._small()
        inflater = Inflater.build(config, self.shape, self.device)
        ends, layers = inflater.ends(small), inflater.layers(small)
        if text is None or plan.weights.target_bits == 16:
            return replace(ends, layers=tuple(layers))
        return quantized_target(
            Decoder(self.config(1.0), self.device), ends, layers, WeightFormat(*plan.weights.target_format), text
        )

    def _small(self) -> tuple[DecoderConfig, DecoderWeights]:
        """The small model, which is not kept, as its memory is not the plan's."""
        config = decoder_config(self.hub, self.source)
        return config, load_weights(self.source, config, self.device, self.dtype)

    @contextlib.contextmanager
    def shared_engine(self, plan: Plan, drafts: dict[int, DecoderWeights], **options: Any) -> Iterator[Engine]:
        """Like `engine`, with its options, closed after the body. drafts: a cache of 4-bit weights by group."""
        group, drafting = plan.weights.group, plan.weights.draft_copy
        engine = self.engine(plan, drafts.get(group) if drafting else None, **options)
        if drafting:
            drafts[group] = engine.draft_weights
        try:
            yield engine
        finally:
            engine.close()


def _require_weight_memory(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
    """Raises InflationError if the shape's weights alone exceed a GPU's free memory, or a machine's total memory."""
    if device.type == "cuda":
        memory_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed_bytes = weight_memory(shape, dtype.itemsize, dtype.itemsize)
    if needed_bytes > memory_bytes:
        raise InflationError(
            f"weights of {shape.name!r} take {needed_bytes / 1e9:.1f} GB; allowed here: {memory_bytes / 1e9:.1f} GB"
        )
