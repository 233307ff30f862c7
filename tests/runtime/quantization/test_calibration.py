"""What 4-bit drafts are fitted to: the inputs of each layer, on a text that is given, written or sampled."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.model.linear import Dense, Int4, LibraryInt4Weight
from ridgeplan.runtime.model.prefill_layer import prefill_layer
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization import calibration as calibrate
from ridgeplan.runtime.quantization.calibration import (
    SAMPLED_TOKENS,
    SEQUENCES,
    TOKENS,
    CalibrationText,
    HessianRecorder,
    fitting_group,
    quantized_draft,
    quantized_linear,
    sampled_tokens,
    self_generated_text,
)
from ridgeplan.runtime.quantization.gptq import quantize_weight


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_token_counts_the_same():
    x = random(2, 10, 32) * torch.tensor([1.0, 1000.0])[:, None, None]
    weight = random(4, 32)
    diagonal, full = (HessianRecorder(weight=weight, hessian=torch.zeros(shape)) for shape in [(32,), (32, 32)])
    outputs = [layer(x) for layer in (Dense(weight), diagonal, full)]
    rows = functional.normalize(x.flatten(0, 1), dim=1) * 32**0.5
    torch.testing.assert_close(full.hessian, rows.T @ rows)
    torch.testing.assert_close(diagonal.hessian, full.hessian.diagonal())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_drafts_are_the_same_each_time(tiny_model, make_plan):
    plan = make_plan("int4x2", 3, draft_bits=4)
    engine, other = (runtime.load(plan, tiny_model().folder, device="cpu") for _ in range(2))
    assert torch.equal(engine.draft_weights.head.weight.packed, other.draft_weights.head.weight.packed)


def test_calibration_changes_the_draft_and_nothing_else(tiny_model, make_plan, prompts):
    plan, text = make_plan("int4x2", 3, draft_bits=4), prompts(200)[0]
    plain = runtime.load(plan, tiny_model().folder, device="cpu")
    calibrated = runtime.load(plan, tiny_model().folder, device="cpu", calibration=text)
    heads = [engine.draft_weights.head.weight.packed for engine in (plain, calibrated)]
    assert not torch.equal(*heads)
    prompt = prompts(90, seed=2)[0]
    assert plain.generate(prompt, 30).tokens == calibrated.generate(prompt, 30).tokens


@pytest.mark.parametrize(
    "calibration, message",
    [
        ([], "no tokens; allowed: 1 or more"),
        ([5, 128], "the token 128; allowed: whole numbers from 0 to 127"),
        ("a text", "the token 'a'"),
        ([1.5], "the token 1.5"),
    ],
)
def test_calibration_that_is_no_text_of_the_model_is_refused(tiny_model, make_plan, calibration, message):
    plan = make_plan("int4x2", 3, draft_bits=4)
    with pytest.raises(WorkloadError, match=message):
        runtime.load(plan, tiny_model().folder, device="cpu", calibration=calibration)


def test_a_model_writes_what_it_finds_likely(tiny_model, make_plan):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu")
    text = self_generated_text(engine.decoder, engine.weights)
    assert text.shape == (SEQUENCES, TOKENS)
    assert torch.equal(text, self_generated_text(engine.decoder, engine.weights))

    def surprise(tokens):
        """Mean over all but the first token of each sequence."""
        hidden = functional.embedding(tokens, engine.weights.embedding)
        for index, layer in enumerate(engine.weights.layers):
            for sequence in hidden:
                prefill_layer(engine.decoder, index, layer, sequence)
        logits = engine.weights.logits(engine.weights.norm(hidden, None)[1])
        entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy().mean()
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / entropy)

    with torch.inference_mode():
        assert surprise(text) == pytest.approx(1, abs=0.03)  # as drawn from the model's own distribution
        assert surprise(torch.randint(engine.config.shape.vocab, text.shape)) > 1.1


def test_sequences_of_a_text_do_not_see_each_other(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu")
    text = torch.tensor(prompts(64, 64))
    texts = (CalibrationText(part, natural=True) for part in (text, text.flip(0), text.view(1, -1)))
    heads = [quantized_draft(engine.decoder, engine.weights, 32, text).head.weight.packed for text in texts]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


# Modules of a transformers layer in the order of our projections; several read the same input.
INPUTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@torch.no_grad()
def hessians_of(reference, text):
    """Of the inputs of each projection and of the head, as transformers computes them."""
    layers = reference.model.layers
    modules = [layer.get_submodule(name) for layer in layers for name in INPUTS] + [reference.lm_head]
    seen = [[] for _ in modules]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(inputs[0]))
        for module, rows in zip(modules, seen, strict=True)
    ]
    reference(text)
    for hook in hooks:
        hook.remove()
    # Every token at a mean square of 1: scaled to a norm of the square root of its width.
    rows = [functional.normalize(torch.cat(each).flatten(0, 1), dim=1) * each[0].shape[-1] ** 0.5 for each in seen]
    return [each.T @ each for each in rows]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("mistral", {"sliding_window": 24}), ("qwen3", {}), ("qwen2", {})],
    ids=["llama", "window", "qwen3", "qwen2"],
)
def test_hessians_are_of_the_inputs_that_transformers_sees(
    family, changes, tiny_model, make_plan, prompts, monkeypatch
):
    model = tiny_model(family, **changes)
    engine = runtime.load(make_plan(), model.folder, device="cpu")
    text, recorded = torch.tensor(prompts(80, 80)), []

    def quantized(linear, group):
        recorded.append(linear.hessian)
        return linear

    monkeypatch.setattr(calibrate, "_quantized", quantized)
    for full in (True, False):
        recorded.clear()
        quantized_draft(engine.decoder, engine.weights, 32, CalibrationText(text, natural=full))
        for hessian, expected in zip(recorded, hessians_of(model.reference, text), strict=True):
            torch.testing.assert_close(hessian, expected if full else expected.diagonal(), rtol=1e-3, atol=1e-2)


def test_every_projection_and_the_head_are_quantized(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu")
    text = CalibrationText.from_tokens(prompts(100)[0], 128)
    draft = quantized_draft(engine.decoder, engine.weights, 32, text)
    linears = [draft.head]
    for layer in draft.layers:
        linears += [*layer.projections]
    assert [type(linear) for linear in linears] == [Int4] * (1 + 4 * 2)
    assert draft.embedding is engine.weights.embedding
    # What is quantized already stays as it is.
    again = quantized_draft(engine.decoder, draft, 32, text)
    assert again.layers[1].mlp.down is draft.layers[1].mlp.down
    assert again.head is draft.head


def test_a_given_text_is_fitted_to_and_a_cpu_samples_one(tiny_model, make_plan, prompts, monkeypatch):
    folder, plan, fitted = tiny_model().folder, make_plan("int4x2", 3, draft_bits=4), []

    def quantized(decoder, weights, group, text, _):
        fitted.append(text)
        return quantized_draft(decoder, weights, group, text)

    monkeypatch.setattr("ridgeplan.runtime.engine.quantized_draft", quantized)
    [tokens] = prompts(100)
    for calibration in (tokens, None):
        runtime.load(plan, folder, device="cpu", calibration=calibration)
    from_text, sampled = fitted
    assert from_text.tokens.tolist() == [tokens]
    assert sampled.tokens.shape == (1, SAMPLED_TOKENS)
    assert (from_text.natural, sampled.natural) == (True, False)


def test_sampled_tokens_are_as_frequent_as_the_model_finds_them(tiny_model, make_plan):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu")
    odds = torch.ones(128)
    odds[5] = 3 * 127  # three quarters
    likely = dataclasses.replace(engine.weights, head=lambda x: odds.log().expand(*x.shape[:-1], -1))
    tokens = sampled_tokens(engine.decoder, likely, likely.layers)
    deviation = (0.75 * 0.25 / SAMPLED_TOKENS) ** 0.5
    assert float((tokens == 5).float().mean()) == pytest.approx(0.75, abs=4 * deviation)
    assert torch.equal(tokens, sampled_tokens(engine.decoder, likely, likely.layers))


# Dense layers become 4-bit ones.


@pytest.mark.parametrize(
    "inputs, group, expected",
    [
        (576, 128, 64),
        (1536, 128, 128),
        (4096, 128, 128),
        (96, 128, 32),
        (64, 32, 32),
        (512, 256, 256),
    ],
)
def test_group_falls_to_what_divides_the_inputs(inputs, group, expected):
    assert fitting_group(inputs, group) == expected


def test_inputs_without_a_group_are_refused():
    with pytest.raises(ModelError, match="has 100 inputs; allowed for 4-bit weights: multiples of 32"):
        fitting_group(100, 128)


def test_a_layer_is_quantized_for_its_inputs():
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in [(16, 64), (16,), (100, 64)])
    hessian = x.T @ x
    packed = quantized_linear(Dense(weight, bias), WeightFormat(4, 128), hessian)
    expected = LibraryInt4Weight.pack(*quantize_weight(weight, 64, hessian))
    assert torch.equal(packed.weight.packed, expected.packed)
    assert torch.equal(packed.weight.scales, expected.scales)
    assert packed.bias is bias


# The acceptance of real drafts with 4-bit weights, by what their quantizer knew.

CONTEXT, JUDGED = 128, 192


@pytest.fixture(scope="module")
def real(smollm2, make_plan, long_text):
    """The real model's engine, the text's tokens, and the acceptance of drafts that read its first tokens."""
    engine = runtime.load(make_plan(), str(smollm2), device="cpu", dtype=torch.float32)
    tokens = engine.tokenizer(long_text[30_000:80_000])["input_ids"]

    @torch.no_grad()
    def probabilities(weights):
        hidden = functional.embedding(torch.tensor(tokens[: CONTEXT + JUDGED]), weights.embedding)
        for index, layer in enumerate(weights.layers):
            prefill_layer(engine.decoder, index, layer, hidden)
        normed = weights.norm(hidden[CONTEXT:], None)[1]
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


@pytest.mark.model
@pytest.mark.slow
def test_acceptance_of_real_drafts_rises(real, rounded):
    engine, _, acceptance = real
    text = CalibrationText.of_model(engine.decoder, engine.weights)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.06


@pytest.mark.model
@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_that_the_model_writes(real, rounded, monkeypatch):
    for name, value in {"SEQUENCES": 4, "TOKENS": 64}.items():  # more take a CPU minutes
        monkeypatch.setattr(f"ridgeplan.runtime.quantization.calibration.{name}", value)
    engine, _, acceptance = real
    text = CalibrationText(self_generated_text(engine.decoder, engine.weights), natural=True)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.08


@pytest.mark.model
@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_of_the_kind(real, rounded):
    engine, tokens, acceptance = real
    text = CalibrationText.from_tokens(tokens[-512:], engine.config.shape.vocab)
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128, text)) > rounded + 0.10
