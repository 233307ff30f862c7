"""Draft weights in 4 bits, quantized for the inputs that each layer sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.decoder import Decoder
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.linear import Dense, Int4, Linear
from ridgeplan.runtime.prefill import prefill_layer
from ridgeplan.runtime.weights import DecoderWeights

SAMPLED_TOKENS = 512


@torch.no_grad()
def quantized_draft(
    decoder: Decoder, weights: DecoderWeights, group: int, calibration: Sequence[int] | None = None
) -> DecoderWeights:
    """4-bit projections and head for drafts; the embedding and the norms stay shared.

    calibration: token ids of text like what will be decoded, a few thousand; each layer is quantized against the
    full second moment of its inputs there. Without it, against the diagonal on tokens that the model samples
    itself, which needs no text and favours none.
    Raises WorkloadError for token ids that are not the model's.
    """
    _check(calibration, decoder.config.vocab)
    tokens = _sampled(decoder, weights) if calibration is None else torch.tensor(calibration)
    hidden = functional.embedding(tokens.to(weights.embedding.device), weights.embedding)
    full, layers = calibration is not None, []
    for layer, window in zip(weights.layers, decoder.config.windows, strict=True):
        recording = layer.with_projections(lambda linear: _recording(linear, full))
        prefill_layer(decoder, recording, hidden, window)
        layers.append(recording.with_projections(lambda linear: _quantized(linear, group)))
    head = _recording(weights.head, full)
    if isinstance(head, Recording):
        head.record(decoder.norm(hidden, None, weights.norm)[1])
    return dataclasses.replace(weights, layers=tuple(layers), head=_quantized(head, group))


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording(Dense):
    """A dense layer that adds up the second moment of its inputs: [inputs, inputs], or the diagonal [inputs].

    Every token counts the same, at a mean square of 1: a few of them, the first above all, are hundreds of times
    as large as the rest in some channels, and would decide alone.
    """

    moment: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        self.record(x)
        return super().__call__(x)

    def record(self, x: Tensor) -> None:
        """Adds inputs [..., inputs]."""
        rows = functional.rms_norm(x.flatten(0, -2).float(), x.shape[-1:])
        if self.moment.dim() == 1:
            self.moment.add_(rows.square().sum(0))
        else:
            self.moment.addmm_(rows.t(), rows)


def _recording(linear: Linear, full: bool) -> Linear:
    """With the `full` moment or the diagonal, nothing recorded; a layer that is in 4 bits already stays."""
    if isinstance(linear, Int4):
        return linear
    inputs = linear.weight.shape[1]
    moment = linear.weight.new_zeros((inputs, inputs) if full else inputs, dtype=torch.float32)
    return Recording(weight=linear.weight, bias=linear.bias, moment=moment)


def _quantized(linear: Linear, group: int) -> Linear:
    return Int4.quantize(linear, group, linear.moment) if isinstance(linear, Recording) else linear


def _sampled(decoder: Decoder, weights: DecoderWeights) -> Tensor:
    """Tokens [SAMPLED_TOKENS] drawn from what the model predicts at each position of random ones, at temperature 1.

    One pass: this is no text, but its tokens are as frequent as the model's own, which is what the diagonal needs.
    """
    device, vocab = weights.embedding.device, decoder.config.vocab
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
    strange = next((token for token in calibration if not isinstance(token, Integral) or not 0 <= token < vocab), None)
    if strange is not None:
        raise WorkloadError(f"calibration holds the token {strange!r}; allowed: whole numbers from 0 to {vocab - 1}")
