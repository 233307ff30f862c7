"""4-bit weights: against round-to-nearest, against GPTQ's own formula, and by the acceptance of real drafts."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from ridgeplan import runtime
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.quantization.calibrate import HessianRecorder, fitted_draft, quantized_draft
from ridgeplan.runtime.quantization.gptq import DAMPING, quantize_weight
from ridgeplan.runtime.quantization.pack import fitting_group
from ridgeplan.runtime.quantization.self_generated import SEQUENCES, TOKENS, self_generated_text


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens, inputs):
    """Inputs of a layer [tokens, inputs]: correlated, and some far larger than others."""
    return random(tokens, inputs, seed=1) @ random(inputs, inputs, seed=2) * random(inputs, seed=3).exp()


def decoded(codes, scale, zero):
    grouped = codes.float().unflatten(1, (scale.shape[1], -1))
    return ((grouped - 8) * scale.unsqueeze(2) + zero.unsqueeze(2)).flatten(1)


def nearest(weight, group):
    """Round-to-nearest on each group's whole range: what the quantizer has to beat."""
    grouped = weight.float().unflatten(1, (-1, group))
    low, high = grouped.aminmax(dim=2)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((grouped - zero.unsqueeze(2)) / scale.unsqueeze(2) + 8).round().clamp(0, 15)
    return codes.flatten(1), scale, zero


SHAPES = [(48, 64, 32), (23, 128, 128), (33, 192, 64), (7, 512, 256)]


@pytest.mark.parametrize("outputs, inputs, group", SHAPES)
@pytest.mark.parametrize("knowledge", ["none", "diagonal", "full"])
def test_codes_and_grid_are_what_the_kernels_take(outputs, inputs, group, knowledge):
    weight, x = random(outputs, inputs).bfloat16(), correlated(300, inputs)
    hessian = {"none": None, "diagonal": x.square().sum(0), "full": x.T @ x}[knowledge]
    codes, scale, zero = quantize_weight(weight, group, hessian)
    assert codes.dtype == torch.int8
    assert (codes.min(), codes.max()) == (0, 15)
    assert codes.shape == weight.shape
    for pair in (scale, zero):
        assert pair.shape == (outputs, inputs // group)
        assert torch.equal(pair, pair.bfloat16().float())


@pytest.mark.parametrize("outputs, inputs, group", SHAPES)
def test_each_knowledge_of_the_inputs_lowers_the_error_it_speaks_of(outputs, inputs, group):
    weight, x = random(outputs, inputs), correlated(2 * inputs, inputs)
    importance = x.square().mean(0)

    def errors(quantized):
        difference = decoded(*quantized) - weight
        weighted = (difference.square() * importance).sum()
        return [float(e) for e in (difference.square().sum(), weighted, (x @ difference.T).square().mean())]

    rounded = errors(nearest(weight, group))
    fitted = errors(quantize_weight(weight, group))
    diagonal = errors(quantize_weight(weight, group, importance))
    full = errors(quantize_weight(weight, group, x.T @ x))
    assert fitted[0] < 0.95 * rounded[0]
    assert diagonal[1] < 0.9 * fitted[1]
    assert full[2] < 0.8 * diagonal[2]


def test_feedback_follows_the_formula():
    """GPTQ, equations 2 and 3, with the inverse of what is left computed anew for every input."""
    outputs, inputs, group = 5, 64, 32
    weight, x = random(outputs, inputs).double(), correlated(100, inputs).double()
    hessian = x.T @ x
    codes, scale, zero = quantize_weight(weight.float(), group, hessian.float())
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(inputs)
    rest, expected = weight.clone(), torch.empty_like(codes)
    for column in range(inputs):
        inverse = torch.linalg.inv(damped[column:, column:])
        step, base = scale[:, column // group].double(), zero[:, column // group].double()
        expected[:, column] = ((rest[:, column] - base) / step + 8).round().clamp(0, 15)
        error = rest[:, column] - ((expected[:, column].double() - 8) * step + base)
        rest[:, column:] -= error[:, None] * inverse[0] / inverse[0, 0]
    assert (codes == expected).float().mean() > 0.99  # float32 may tip a value that lies between two codes


def test_uncorrelated_inputs_need_no_feedback():
    weight, importance = random(20, 128), random(128, seed=1).square()
    full = quantize_weight(weight, 64, importance.diag())
    diagonal = quantize_weight(weight, 64, importance)
    assert all(torch.equal(one, other) for one, other in zip(full, diagonal, strict=True))


@pytest.mark.parametrize("hessian", [None, torch.zeros(64), torch.zeros(64, 64)], ids=["none", "diagonal", "full"])
def test_constant_groups_and_silent_inputs_stay_finite(hessian):
    constant = torch.full((16, 64), 0.25)
    assert torch.equal(decoded(*quantize_weight(constant, 32, hessian)), constant)
    weight = random(16, 64)
    assert (decoded(*quantize_weight(weight, 32, hessian)) - weight).abs().max() < 0.5


def test_large_offsets_cost_no_accuracy():
    weight = random(8, 64) * 0.01
    shifted = decoded(*quantize_weight(weight + 1, 64)) - 1
    rounding = 2**-8  # of the zero: half of what lies between bfloat16 values from 1 to 2
    plain = decoded(*quantize_weight(weight, 64))
    assert (shifted - weight).abs().max() < (plain - weight).abs().max() + rounding


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
    one, other = (runtime.load(plan, tiny_model().folder, device="cpu") for _ in range(2))
    assert torch.equal(one.draft_weights.head.weight.packed, other.draft_weights.head.weight.packed)


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
        for layer, window in zip(engine.weights.layers, engine.config.windows, strict=True):
            for sequence in hidden:
                prefill_layer(engine.decoder, layer, sequence, window)
        logits = engine.weights.head(engine.decoder.norm(hidden, None, engine.weights.norm)[1])
        entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy().mean()
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / entropy)

    with torch.inference_mode():
        assert surprise(text) == pytest.approx(1, abs=0.03)  # as drawn from the model's own distribution
        assert surprise(torch.randint(engine.config.shape.vocab, text.shape)) > 1.1


def test_sequences_of_a_text_do_not_see_each_other(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu")
    text = torch.tensor(prompts(64, 64))
    one, other = (fitted_draft(engine.decoder, engine.weights, 32, part, full=True) for part in (text, text.flip(0)))
    joined = fitted_draft(engine.decoder, engine.weights, 32, text.view(1, -1), full=True)
    heads = [draft.head.weight.packed for draft in (one, other, joined)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


CONTEXT, JUDGED = 256, 256


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
        return Dense(decoded(*nearest(dense.weight, fitting_group(dense.weight.shape[1], 128))), dense.bias)

    engine, _, acceptance = real
    layers = tuple(layer.with_projections(draft) for layer in engine.weights.layers)
    return acceptance(dataclasses.replace(engine.weights, layers=layers, head=draft(engine.weights.head)))


@pytest.mark.model
def test_acceptance_of_real_drafts_rises(real, rounded):
    engine, _, acceptance = real
    assert acceptance(quantized_draft(engine.decoder, engine.weights, 128)) > rounded + 0.04


@pytest.mark.model
@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_that_the_model_writes(real, rounded, monkeypatch):
    monkeypatch.setattr("ridgeplan.runtime.quantization.self_generated.SEQUENCES", 8)  # more take a CPU minutes
    engine, _, acceptance = real
    draft = fitted_draft(
        engine.decoder, engine.weights, 128, self_generated_text(engine.decoder, engine.weights), full=True
    )
    assert acceptance(draft) > rounded + 0.08


@pytest.mark.model
@pytest.mark.slow
def test_acceptance_rises_further_with_a_text_of_the_kind(real, rounded):
    engine, tokens, acceptance = real
    calibration = tokens[-1024:]
    draft = quantized_draft(engine.decoder, engine.weights, 128, calibration)
    assert acceptance(draft) > rounded + 0.08
