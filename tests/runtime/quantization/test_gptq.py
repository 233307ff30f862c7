"""4-bit weights: against round-to-nearest, against the best of all grids, and against GPTQ's own formula."""

import itertools

import pytest
import torch

from ridgeplan.runtime.quantization import gptq
from ridgeplan.runtime.quantization.gptq import DAMPING, REACH, QuantizedRows, quantize_planes, quantize_weight
from ridgeplan.runtime.quantization.gptq import decoded as decoded_weight


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
    assert codes.dtype == torch.int16
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


def least_errors(weight, importance, group):
    """The least weighted squared error of each group [outputs * groups] over a fine lattice of scales and zeros."""
    grouped = weight.double().unflatten(1, (-1, group)).flatten(0, 1)
    weights = importance.double().unflatten(0, (-1, group)).repeat(len(weight), 1)
    low, high = grouped.aminmax(dim=1, keepdim=True)
    min_error = torch.full((len(grouped),), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.5, 1.1, 121):
        step = (high - low) * share / 15
        for shift in torch.linspace(-0.15, 0.15, 41):
            zero = (low + high) / 2 + shift * (high - low) + step / 2
            rounded = ((grouped - zero) / step).round().clamp(-8, 7) * step + zero
            min_error = torch.minimum(min_error, ((rounded - grouped).square() * weights).sum(1))
    return min_error


@pytest.mark.parametrize(("spread", "bound"), [(0.5, 1.095), (2.0, 1.32)], ids=["similar inputs", "unequal inputs"])
def test_grids_come_close_to_the_best_of_all(spread, bound):
    """The bounds are tight: one refit less, or one range too few, passes neither."""
    weight, importance, group = random(64, 64), (spread * random(64, seed=1)).exp(), 32
    difference = decoded(*quantize_weight(weight, group, importance)) - weight
    errors = (difference.double().square() * importance).unflatten(1, (-1, group)).sum(2)
    assert 1 <= float(errors.sum() / least_errors(weight, importance, group).sum()) < bound


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
    assert all(torch.equal(tensor, other) for tensor, other in zip(full, diagonal, strict=True))


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


def test_inputs_that_are_never_used_change_nothing():
    """As channels of a real MLP that never fire, or those around a small model in a larger shape."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, 128, generator=generator), torch.randn(300, 128, generator=generator)
    x = x @ torch.randn(128, 128, generator=generator)  # correlated, so that errors are made up for
    wide = torch.zeros(256, 256)
    wide[:128, :128] = x.T @ x
    codes, scale, zero = quantize_weight(torch.cat([weight, torch.zeros(16, 128)], dim=1), 64, wide)
    for tensor, expected in zip((codes, scale, zero), quantize_weight(weight, 64, x.T @ x), strict=True):
        assert torch.equal(tensor[:, : expected.shape[1]], expected)
    assert scale[:, 2:].abs().max() == 0


@pytest.mark.parametrize("knowledge", ["none", "diagonal", "full"])
def test_8_bits_have_a_sixteenth_of_the_error(knowledge):
    """Steps are a seventeenth as wide; scales of 16 bits and refitted grids cost the rest."""
    weight, x = random(48, 128), correlated(300, 128)
    hessian = {"none": None, "diagonal": x.square().sum(0), "full": x.T @ x}[knowledge]
    four, eight = (decoded_weight(*quantize_weight(weight, 64, hessian, bits), bits) - weight for bits in (4, 8))
    outputs = [float((x @ error.T).norm()) for error in (four, eight)]
    assert outputs[1] < outputs[0] / 12


def test_planes_add_up_to_nearly_8_bits():
    weight, x = random(48, 256), correlated(600, 256)
    upper, lower = (decoded_weight(*plane) for plane in quantize_planes(weight, 64, x.T @ x))

    def error(fitted):
        return float((x @ (fitted - weight).T).norm())

    four, eight = (decoded_weight(*quantize_weight(weight, 64, x.T @ x, bits), bits) for bits in (4, 8))
    assert error(upper) < 1.1 * error(four)  # so drafts lose nothing
    assert error(eight) < error(upper + lower) < error(four) / 5


@pytest.mark.parametrize("sweeps", [0, 2])
def test_upper_codes_stay_within_reach(sweeps, monkeypatch):
    """But where the grid ends before the weights do: its range is chosen for the sum of errors."""
    monkeypatch.setattr(gptq, "SWEEPS", sweeps)
    weight, x = random(48, 256), correlated(600, 256)
    codes, scale, zero = quantize_planes(weight, 64, x.T @ x)[0]
    steps = (weight - decoded_weight(codes, scale, zero)).abs() / scale.repeat_interleave(64, 1)
    inside = (codes > 0) & (codes < 15)
    assert REACH - 0.02 < steps[inside].max() < REACH + 0.001  # what is compensated takes the farther neighbour


def test_sweeps_lower_the_error_of_both_planes(monkeypatch):
    weight, x = random(48, 256), correlated(600, 256)
    errors = []
    for sweeps in (0, 1, 2):
        monkeypatch.setattr(gptq, "SWEEPS", sweeps)
        upper, lower = (decoded(*plane) for plane in quantize_planes(weight, 64, x.T @ x))
        errors.append([float((x @ (plane - weight).T).square().sum()) for plane in (upper, upper + lower)])
    for gptq_alone, once, twice in zip(*errors, strict=True):
        assert gptq_alone > 1.1 * once
        assert once > 1.01 * twice


# Coordinate descent on codes and grids, against its definition column by column and against least squares.

OUTPUTS, INPUTS, GROUP = 12, 96, 32


@pytest.fixture
def hessian():
    x = random(300, INPUTS, seed=1) @ random(INPUTS, INPUTS, seed=2)
    product = x.T @ x / 300
    return product + 0.1 * product.diagonal().mean() * torch.eye(INPUTS)


@pytest.fixture
def rows(hessian):
    """A weight rounded to nearest."""
    weight, groups = random(OUTPUTS, INPUTS), INPUTS // GROUP
    scale = torch.full((OUTPUTS, groups), 0.3125)
    zero = (0.1 * random(OUTPUTS, groups, seed=3)).bfloat16().float()
    codes = ((weight - zero.repeat_interleave(GROUP, 1)) / 0.3125 + 8).round().clamp(0, 15)
    return QuantizedRows(weight, codes, scale, zero, hessian, top=15)


def decoded_codes(rows):
    scale, zero = (pair.double().repeat_interleave(GROUP, 1) for pair in (rows.scale, rows.zero))
    return (rows.codes.double() - 8) * scale + zero


def error(rows):
    missed = decoded_codes(rows) - rows.weight.double()
    return float(((missed @ rows.hessian.double()) * missed).sum())


def test_a_sweep_is_the_best_code_of_each_input_in_turn(rows):
    """QuantEase, algorithm 1: the minimum over one code of the whole error, all others given."""
    weight, hessian, before = rows.weight.double(), rows.hessian.double(), rows.codes.clone()
    expected = before.double()
    scale, zero = (pair.double().repeat_interleave(GROUP, 1) for pair in (rows.scale, rows.zero))
    for column in range(INPUTS):
        missed = (expected - 8) * scale + zero - weight
        others = missed @ hessian[:, column] - missed[:, column] * hessian[column, column]
        best = weight[:, column] - others / hessian[column, column]
        expected[:, column] = ((best - zero[:, column]) / scale[:, column] + 8).round().clamp(0, 15)
    rows.sweep()
    assert (rows.codes != before).float().mean() > 0.1
    assert (rows.codes == expected).float().mean() > 0.99  # float32 may tip a value that lies between two codes


def test_a_refit_is_the_least_squares_grid_of_each_group_in_turn(rows):
    """The errors' norm under H is that of L^T e with H = L L^T, a common least-squares problem."""
    factor, codes = torch.linalg.cholesky(rows.hessian.double()), rows.codes.double() - 8
    scale, zero = rows.scale.clone().double(), rows.zero.clone().double()
    for index in range(INPUTS // GROUP):
        inside = slice(index * GROUP, (index + 1) * GROUP)
        for output in range(OUTPUTS):
            wide = [pair[output].repeat_interleave(GROUP) for pair in (scale, zero)]
            rest = rows.weight[output].double() - codes[output] * wide[0] - wide[1]
            rest[inside] += codes[output, inside] * scale[output, index] + zero[output, index]
            basis = torch.zeros(INPUTS, 2, dtype=torch.float64)
            basis[inside] = torch.stack([codes[output, inside], torch.ones(GROUP, dtype=torch.float64)], dim=1)
            solution = torch.linalg.lstsq(factor.T @ basis, (factor.T @ rest)[:, None]).solution[:, 0]
            scale[output, index], zero[output, index] = solution.bfloat16().double()
    rows.refit()
    assert torch.allclose(rows.scale.double(), scale, rtol=2**-7)
    assert torch.allclose(rows.zero.double(), zero, rtol=2**-6, atol=1e-3)


def test_the_error_never_grows_and_the_gradient_is_kept(rows):
    errors = [error(rows)]
    for step in (rows.sweep, rows.refit, rows.sweep, rows.refit):
        step()
        errors.append(error(rows))
    grown = [after / before for before, after in itertools.pairwise(errors)]
    assert max(grown) < 1 + 1e-3  # grids are rounded to bfloat16
    assert errors[-1] < 0.7 * errors[0]
    exact = (decoded_codes(rows) - rows.weight.double()) @ rows.hessian.double()
    assert torch.allclose(rows.gradient.double(), exact, atol=1e-4 * float(exact.abs().max()))


def test_codes_are_next_to_what_they_are_bounded_by(rows):
    near = rows.steps()
    rows.sweep(near)
    assert ((rows.codes == near.floor().clamp(0, 15)) | (rows.codes == near.ceil().clamp(0, 15))).all()


def test_constant_groups_keep_their_grid(hessian):
    """Codes that are all the same determine no scale; a scale of 0 divides nothing."""
    weight, groups = torch.full((2, INPUTS), 0.5), INPUTS // GROUP
    scale = torch.tensor([[0.0] * groups, [0.25] * groups])
    zero = torch.full((2, groups), 0.5)
    rows = QuantizedRows(weight, torch.full((2, INPUTS), 8.0), scale.clone(), zero.clone(), hessian, top=15)
    rows.refit()
    rows.sweep()
    assert torch.equal(rows.scale, scale)
    assert torch.equal(decoded_codes(rows).float(), weight)
