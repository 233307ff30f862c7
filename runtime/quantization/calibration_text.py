"""Calibration text: the tokens that 4-bit weights are fitted to, given or of the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.quantization.self_generated import self_generated_text

SAMPLED_TOKENS = 512


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """Token ids int64 [sequences, tokens] of independent sequences.

    natural: whether each token follows from those before, so that whole Hessians are worth measuring; else only their
    diagonals are.
    """

    tokens: Tensor
    natural: bool

    @classmethod
    def given(cls, tokens: Sequence[int], vocab: int) -> CalibrationText:
        """One text, a few thousand tokens of what will be decoded. Raises WorkloadError for tokens not in `vocab`."""
        _check(tokens, vocab)
        return cls(torch.tensor(tokens)[None], natural=True)

    @classmethod
    def of_model(cls, decoder: Decoder, weights: DecoderWeights) -> CalibrationText:
        """A text that the model itself generates, which takes seconds on a GPU.

        On a CPU that would take minutes, so there it is tokens that the model samples in one pass.
        """
        if weights.embedding.is_cuda:
            return cls(self_generated_text(decoder, weights), natural=True)
        return cls(sampled_tokens(decoder, weights)[None], natural=False)


@torch.no_grad()
def sampled_tokens(decoder: Decoder, weights: DecoderWeights) -> Tensor:
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


def _check(tokens: Sequence[int], vocab: int) -> None:
    if len(tokens) == 0:
        raise WorkloadError("calibration has no tokens; allowed: 1 or more token ids, or None")
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab:
            allowed = f"whole numbers from 0 to {vocab - 1}"
            raise WorkloadError(f"calibration holds the token {token!r}; allowed: {allowed}")
