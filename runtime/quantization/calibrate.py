"""4-bit and 8-bit weights, of drafts or of the target, quantized with each layer's Hessian."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration_text import CalibrationText
from ridgeplan.runtime.quantization.pack import quantized_linear


@torch.no_grad()
def quantized_draft(decoder: Decoder, weights: DecoderWeights, group: int, text: CalibrationText) -> DecoderWeights:
    """4-bit projections and head for drafts; the embedding and the norms are shared with the target."""
    return _with_head(decoder, weights, weights.layers, WeightFormat(4, group), text)


@torch.no_grad()
def quantized_target(
    decoder: Decoder, ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat, text: CalibrationText
) -> DecoderWeights:
    """Projections for the target in the format `target`; `ends` are its embedding, norm and head.

    The head becomes one of 8 bits, but none of 4: it stays in full precision there. layers: dense ones, each quantized
    before the next is asked for. Nothing here refers to them afterwards.
    """
    if target.bits == 8:
        return _with_head(decoder, ends, layers, target, text)
    hidden = _embedded(ends, text)
    return dataclasses.replace(ends, layers=tuple(_fitted(decoder, layers, hidden, target, text.natural)))


@torch.no_grad()
def rounded_target(ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat) -> DecoderWeights:
    """Like `quantized_target`, but rounded to nearest, without a text, and with the head as it is."""
    rounded = (layer.with_projections(lambda linear: _rounded(linear, target)) for layer in layers)
    return dataclasses.replace(ends, layers=tuple(rounded))


def _with_head(
    decoder: Decoder, ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat, text: CalibrationText
) -> DecoderWeights:
    hidden = _embedded(ends, text)
    fitted = tuple(_fitted(decoder, layers, hidden, target, text.natural))
    head = _recorder(ends.head, text.natural)
    if isinstance(head, HessianRecorder):
        head.record(decoder.norm(hidden, None, ends.norm)[1])
    return dataclasses.replace(ends, layers=fitted, head=_quantized(head, target))


def _embedded(weights: DecoderWeights, text: CalibrationText) -> Tensor:
    return functional.embedding(text.tokens.to(weights.embedding.device), weights.embedding)


def _fitted(
    decoder: Decoder, layers: Iterable[LayerWeights], hidden: Tensor, target: WeightFormat, full: bool
) -> Iterator[LayerWeights]:
    """Each layer quantized for its inputs; hidden [sequences, tokens, hidden] passes the dense layers in place.

    full: with the whole Hessian; else with its diagonal only.
    """
    for layer, window in zip(layers, decoder.config.windows, strict=True):
        recorder = layer.with_projections(lambda linear: _recorder(linear, full))
        for sequence in hidden:
            prefill_layer(decoder, recorder, sequence, window)
        yield recorder.with_projections(lambda linear: _quantized(linear, target))


@dataclass(frozen=True, eq=False, kw_only=True)
class HessianRecorder(Dense):
    """A dense layer that accumulates the Hessian of its inputs: [inputs, inputs], or the diagonal [inputs].

    Every token is scaled to a mean square of 1. Otherwise a few tokens, above all the first, would dominate: in some
    channels they are hundreds of times larger than the others.
    """

    hessian: Tensor

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        self.record(x)
        return super().__call__(x, gated)

    def record(self, x: Tensor) -> None:
        """Adds inputs [..., inputs]."""
        rows = functional.rms_norm(x.flatten(0, -2).float(), x.shape[-1:])
        if self.hessian.dim() == 1:
            self.hessian.add_(rows.square().sum(0))
        else:
            self.hessian.addmm_(rows.t(), rows)


def _recorder(linear: Linear, full: bool) -> Linear:
    """A recorder of the `full` Hessian or its diagonal; a layer that is already quantized is returned unchanged."""
    if not isinstance(linear, Dense):
        return linear
    inputs = linear.weight.shape[1]
    hessian = linear.weight.new_zeros((inputs, inputs) if full else inputs, dtype=torch.float32)
    return HessianRecorder(weight=linear.weight, bias=linear.bias, hessian=hessian)


def _quantized(linear: Linear, target: WeightFormat) -> Linear:
    return quantized_linear(linear, target, linear.hessian) if isinstance(linear, HessianRecorder) else linear


def _rounded(linear: Linear, target: WeightFormat) -> Linear:
    return quantized_linear(linear, target) if isinstance(linear, Dense) else linear
