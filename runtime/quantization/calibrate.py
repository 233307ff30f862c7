"""4-bit draft weights, quantized with each layer's Hessian."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.quantization.pack import int4_linear
from ridgeplan.runtime.quantization.self_generated import self_generated_text

SAMPLED_TOKENS = 512


def quantized_draft(
    decoder: Decoder, weights: DecoderWeights, group: int, calibration: Sequence[int] | None = None
) -> DecoderWeights:
    """4-bit projections and head for drafts; the embedding and the norms are shared with the target.

    calibration: a few thousand token ids of text similar to what will be decoded. Without it, on CUDA the model
    generates a text itself, which takes seconds. On a CPU that would take minutes, so only the Hessians' diagonals are
    measured, on tokens that the model samples in one pass.
    Raises WorkloadError for token ids outside the vocabulary.
    """
    _check(calibration, decoder.config.shape.vocab)
    if calibration is not None:
        return fitted_draft(decoder, weights, group, torch.tensor(calibration)[None], full=True)
    if weights.embedding.is_cuda:
        return fitted_draft(decoder, weights, group, self_generated_text(decoder, weights), full=True)
    return fitted_draft(decoder, weights, group, _sampled(decoder, weights)[None], full=False)


@torch.no_grad()
def fitted_draft(decoder: Decoder, weights: DecoderWeights, group: int, text: Tensor, full: bool) -> DecoderWeights:
    """Quantizes each layer for its inputs on `text`, token ids [sequences, tokens] of independent sequences.

    full: with the whole Hessian, for natural text; else with its diagonal only.
    """
    hidden = functional.embedding(text.to(weights.embedding.device), weights.embedding)
    layers = []
    for layer, window in zip(weights.layers, decoder.config.windows, strict=True):
        recorder = layer.with_projections(lambda linear: _recorder(linear, full))
        for sequence in hidden:
            prefill_layer(decoder, recorder, sequence, window)
        layers.append(recorder.with_projections(lambda linear: _quantized(linear, group)))
    head = _recorder(weights.head, full)
    if isinstance(head, HessianRecorder):
        head.record(decoder.norm(hidden, None, weights.norm)[1])
    return dataclasses.replace(weights, layers=tuple(layers), head=_quantized(head, group))


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


def _quantized(linear: Linear, group: int) -> Linear:
    return int4_linear(linear, group, linear.hessian) if isinstance(linear, HessianRecorder) else linear


def _sampled(decoder: Decoder, weights: DecoderWeights) -> Tensor:
    """Tokens [SAMPLED_TOKENS], each drawn from what the model predicts at a position of random tokens.

    It takes one pass. The result is not text, but its token frequencies are the model's own, which suffices for the
    diagonal.
    """
    device, vocab = weights.embedding.device, decoder.config.shape.vocab
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(vocab, (SAMPLED_TOKENS,), generator=generator, device=device)
    hidden = functional.embedding(tokens, weights.embedding)
    for layer, window in zip(weights.layers, decoder.config.windows, strict=True):
        prefill_layer(decoder, layer, hidden, window)
    logits = weights.head(decoder.norm(hidden, None, weights.norm)[1]).float()
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _check(calibration: Sequence[int] | None, vocab: int) -> None:
    if calibration is None:
        return
    if len(calibration) == 0:
        raise WorkloadError("calibration has no tokens; allowed: 1 or more token ids, or None")
    for token in calibration:
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab:
            allowed = f"whole numbers from 0 to {vocab - 1}"
            raise WorkloadError(f"calibration holds the token {token!r}; allowed: {allowed}")
