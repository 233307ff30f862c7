"""The acceptance of real drafts with 4-bit weights, by what their quantizer knew."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from ridgeplan import runtime
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.quantization.calibration import (
    CalibrationText,
    fitting_group,
    quantized_draft,
    self_generated_text,
)

pytestmark = pytest.mark.model

CONTEXT, JUDGED = 128, 192


@pytest.fixture(scope="module")
def real(smollm2, make_plan, long_text):
    """The real model's engine, the text's tokens, and the acceptance of drafts that read its first tokens."""
    engine = runtime.load(make_plan(), str(smollm2), device="cpu", dtype=torch.float32)
    tokens = engine.tokenizer(long_text[30_000:80_000])["input_ids"]

    @torch.no_grad()
    def probabilities(weights):
        hidden = functional.embedding(torch.tensor(tokens[: CONTEXT + JUDGED]), weights.embedding)
        for layer, window in zip(weights.layers, engine.config.windows, strict=True):
            prefill_layer(engine.decoder, layer, hidden, window)
        normed = engine.decoder.norm(hidden[CONTEXT:], None, weights.norm)[1]
        return weights.head(normed).float().softmax(-1)

    target = probabilities(engine.weights)
    return engine, tokens, lambda weights: float(torch.minimum(target, probabilities(weights)).sum(-1).mean())


@pytest.fixture(scope="module")
def rounded(real):
    """Acceptance of drafts with round-to-nearest weights in the same format."""

    def draft(dense):
        """On each group's whole range, with scale and zero in bfloat16: what the quantizer has to beat."""
        grouped = dense.weight.float().unflatten(1, (-1, fitting_group(dense.weight.shape[1], 128)))
        low, high = grouped.aminmax(dim=2, keepdim=True)
        scale = ((high - low) / 15).bfloat16().float()
        zero = (low + 8 * scale).bfloat16().float()
        codes = ((grouped - zero) / scale + 8).round().clamp(0, 15)
        return Dense(((codes - 8) * scale + zero).flatten(1), dense.bias)

    engine, _, acceptance = real
    layers = tuple(layer.with_projections(draft) for layer in engine.weights.layers)
    return acceptance(dataclasses.replace(engine.weights, layers=layers, head=draft(engine.weights.head)))


@pytest.mark.slow
def test_acceptance_of_real_drafts_rises(real, rounded):
    engine, _, acceptance = real
    text = CalibrationText.of_model(engine.decoder, engine.weights)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.06


@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_that_the_model_writes(real, rounded, monkeypatch):
    for name, value in {"SEQUENCES": 4, "TOKENS": 64}.items():  # more take a CPU minutes
        monkeypatch.setattr(f"ridgeplan.runtime.quantization.calibration.{name}", value)
    engine, _, acceptance = real
    text = CalibrationText(self_generated_text(engine.decoder, engine.weights), natural=True)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.08


@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_of_the_kind(real, rounded):
    engine, tokens, acceptance = real
    text = CalibrationText.given(tokens[-512:], engine.config.shape.vocab)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.10
