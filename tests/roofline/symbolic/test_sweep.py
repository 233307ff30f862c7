"""Compiled sweeps: equal to the direct evaluation, and open to sympy."""

import numpy as np
import pytest
import sympy

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.symbolic import FIGURES, compile_sweep, symbol, symbolic_figure


@pytest.fixture(scope="module")
def shape():
    return load_shape("Llama-3.1-8B")


@pytest.fixture(scope="module")
def machine(h200_profile):
    return Machine.of(h200_profile)


@pytest.fixture(scope="module")
def quantspec(shape, machine):
    plan = preset("quantspec", Workload("Llama-3.1-8B", "h200", 131072))
    return strategy_of(plan, shape, machine, 0.93), rates_of(plan, shape, machine)


def points(count):
    random = np.random.default_rng(0)
    return {
        "batch": random.integers(1, 64, count).astype(float),
        "context": random.integers(1000, 200_000, count).astype(float),
        "gamma": random.integers(0, 16, count).astype(float),
        "acceptance": random.uniform(0.5, 0.99, count),
    }


SLOW = ("peak_bytes", "tokens_per_round")


@pytest.mark.parametrize(
    "figure", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in FIGURES]
)
def test_a_sweep_equals_the_direct_evaluation(figure, shape, machine, quantspec):
    values = points(200)
    swept = compile_sweep(figure, shape, machine, *quantspec, list(values))(**values)
    strategy, rates = quantspec
    direct = FIGURES[figure](evaluate(shape, machine, strategy.with_terms(**values), rates))
    np.testing.assert_allclose(swept, direct, rtol=1e-9)


def test_many_plans_are_swept_in_pieces(shape, machine, quantspec):
    """20,000 points in a grid of 100 x 200, more than one piece holds: time per token grows with context and batch."""
    sweep = compile_sweep("tpot_s", shape, machine, *quantspec, ["batch", "context"])
    batch, context = np.arange(1.0, 101)[:, None], np.linspace(1000, 200_000, 200)[None]
    found = sweep(batch=batch, context=context)
    assert found.shape == (100, 200)
    assert (np.diff(found, axis=0) > 0).mean() > 0.97  # but where a batch no longer fits the skinny kernels' rows
    assert (np.diff(found, axis=1) > 0).all()
    for row, column in ((0, 0), (47, 113), (99, 199)):
        assert found[row, column] == sweep(batch=batch[row, 0], context=context[0, column])


def test_the_expression_prints_and_differentiates(shape, machine, quantspec):
    expression = symbolic_figure("tpot_s", shape, machine, *quantspec, ["acceptance"])
    assert r"\alpha" in sympy.latex(expression)
    slope = sympy.diff(expression, symbol("acceptance"))
    assert float(slope.subs(symbol("acceptance"), 0.9)) < 0  # more acceptance, less time


def test_wrong_names_are_named(shape, machine, quantspec):
    with pytest.raises(ValueError, match="'speed'; allowed: tpot_s"):
        compile_sweep("speed", shape, machine, *quantspec, ["gamma"])
    with pytest.raises(ValueError, match="'gama' is not a term"):
        compile_sweep("tpot_s", shape, machine, *quantspec, ["gama"])
    with pytest.raises(ValueError, match="needed: gamma"):
        compile_sweep("tpot_s", shape, machine, *quantspec, ["gamma"])(context=1)
