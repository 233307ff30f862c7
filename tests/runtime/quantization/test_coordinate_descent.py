"""Coordinate descent on codes and grids, against its definition column by column and against least squares."""

import itertools

import pytest
import torch

from ridgeplan.runtime.quantization.gptq import QuantizedRows

OUTPUTS, INPUTS, GROUP = 12, 96, 32


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def hessian():
    x = random(300, INPUTS, seed=1) @ random(INPUTS, INPUTS, seed=2)
    found = x.T @ x / 300
    return found + 0.1 * found.diagonal().mean() * torch.eye(INPUTS)


@pytest.fixture
def rows(hessian):
    """A weight rounded to nearest."""
    weight, groups = random(OUTPUTS, INPUTS), INPUTS // GROUP
    scale = torch.full((OUTPUTS, groups), 0.3125)
    zero = (0.1 * random(OUTPUTS, groups, seed=3)).bfloat16().float()
    codes = ((weight - zero.repeat_interleave(GROUP, 1)) / 0.3125 + 8).round().clamp(0, 15)
    return QuantizedRows(weight, codes, scale, zero, hessian, top=15)


def decoded(rows):
    scale, zero = (pair.double().repeat_interleave(GROUP, 1) for pair in (rows.scale, rows.zero))
    return (rows.codes.double() - 8) * scale + zero


def error(rows):
    missed = decoded(rows) - rows.weight.double()
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
            found = torch.linalg.lstsq(factor.T @ basis, (factor.T @ rest)[:, None]).solution[:, 0]
            scale[output, index], zero[output, index] = found.bfloat16().double()
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
    exact = (decoded(rows) - rows.weight.double()) @ rows.hessian.double()
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
    assert torch.equal(decoded(rows).float(), weight)
