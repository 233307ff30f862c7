"""Symbols of the cost model: letters, units, positivity."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import sympy

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline import cost
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.strategy import TERM_NAMES, DraftStrategy, Strategy, TargetStrategy
from ridgeplan.roofline.symbolic import (
    FIGURES,
    LETTERS,
    compile_sweep,
    decode_formulas,
    symbol,
    symbolic_shape,
    unit,
)


def test_symbols_have_the_papers_letters_and_units():
    assert (str(symbol("context")), unit("context")) == ("S", "tokens")
    assert (str(symbol("acceptance")), unit("acceptance")) == ("alpha", "probability")
    assert (str(symbol("offload")), unit("offload")) == ("offload", "")


def test_symbols_are_positive_so_that_sympy_simplifies():
    context = symbol("context")
    assert context.is_positive
    assert sympy.sqrt(context**2) == context
    assert sympy.Max(context, 0) == context


def test_a_symbolic_shape_has_the_properties_of_one_in_numbers():
    heads, head_dim = symbol("q_heads"), symbol("head_dim")
    shape = symbolic_shape(kv_heads=heads)
    assert shape.kv_elements_per_token_per_layer == 2 * heads * head_dim
    assert shape.dense_params == 3 * symbol("layers") * symbol("hidden") * symbol("intermediate")


def test_any_term_of_a_strategy_may_be_a_symbol_and_nothing_else():
    formats = {"weight_bytes": 2.0, "head_bytes": 2.0, "dense": 1, "head_dense": 1, "bits": 0}
    strategy = Strategy(
        batch=1.0, context=2.0, new_tokens=3.0, target=TargetStrategy(**formats), draft=DraftStrategy(**formats)
    )
    opened = strategy.with_terms(**{name: symbol(name) for name in TERM_NAMES})
    assert (opened.gamma, opened.context) == (symbol("gamma"), symbol("context"))
    assert (opened.draft.ratio, opened.target.bits) == (symbol("draft_ratio"), symbol("target_bits"))
    assert (opened.offload.budget, opened.eviction.chunk) == (symbol("offload_budget"), symbol("eviction_chunk"))
    assert strategy.with_terms(draft_ratio=0.5) == replace(strategy, draft=replace(strategy.draft, ratio=0.5))
    with pytest.raises(ValueError, match="'speed' is not a term of a strategy; allowed: acceptance, adaptation, batch"):
        strategy.with_terms(speed=1)


# Formulas with a model's numbers put in are the costs that predictions use.

SIZES = {"batch": 3, "context": 5000, "element_bytes": 2, "target_weight_bytes": 0.5625}
QUERIES = 4


@pytest.mark.parametrize(
    "model",
    ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3",
     "mistralai/Mistral-7B-v0.1"],
)  # fmt: skip
def test_numbers_in_formulas_are_the_costs(model: str) -> None:
    shape = load_shape(model)
    known = {symbol(name): getattr(shape, name) for name in LETTERS} | {symbol(k): v for k, v in SIZES.items()}
    known[sympy.Symbol("q", positive=True)] = QUERIES
    terms = PassTerms(
        batch=3, queries=QUERIES, quantized_tokens=0, full_tokens=5000, bits=0, group=1, splits=1,
        weight_bytes=0.5625, head_bytes=2, element_bytes=2,
    )  # fmt: skip
    costs = decode_pass(shape, terms)
    formulas = decode_formulas(shape)
    assert [formula.op for formula in formulas] == [op.name for op in costs]
    for formula, op in zip(formulas, costs, strict=True):
        numbers = [
            float(term.subs(known))
            for term in (formula.launches, formula.flops, formula.read_bytes, formula.write_bytes)
        ]
        assert numbers == pytest.approx([op.launches, op.cost.flops, op.cost.read_bytes, op.cost.write_bytes])


def test_a_dense_model_s_formulas_are_letters() -> None:
    """Attention reads 2 D elements of every KV head and token: 2 D H_kv S e bytes a sequence."""
    (attention,) = (
        formula for formula in decode_formulas(load_shape("meta-llama/Llama-3.1-8B")) if formula.op == "attention"
    )
    batch, context, size, heads, dim = map(symbol, ("batch", "context", "element_bytes", "kv_heads", "head_dim"))
    assert sympy.diff(attention.read_bytes, context).equals(2 * batch * dim * heads * size)


# Compiled sweeps: equal to the direct evaluation, and open to sympy.


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


@pytest.fixture(scope="module")
def sweep_of(shape, machine, quantspec):
    """Compiled sweeps of all varying terms by figure: sympy takes seconds for each."""
    return functools.cache(lambda figure: compile_sweep(figure, shape, machine, *quantspec, list(points(1))))


@pytest.mark.parametrize(
    "figure", [figure if figure == "tpot_s" else pytest.param(figure, marks=pytest.mark.slow) for figure in FIGURES]
)
def test_a_sweep_equals_the_direct_evaluation(figure, shape, machine, quantspec, sweep_of):
    values = points(200)
    swept = sweep_of(figure)(**values)
    strategy, rates = quantspec
    direct = FIGURES[figure](evaluate(shape, machine, strategy.with_terms(**values), rates))
    np.testing.assert_allclose(swept, direct, rtol=1e-9)


def test_many_plans_are_swept_in_pieces(sweep_of):
    """20,000 points in a grid of 100 x 200, more than one piece holds: time per token grows with context and batch."""
    sweep = functools.partial(sweep_of("tpot_s"), gamma=4, acceptance=0.93)
    batch, context = np.arange(1.0, 101)[:, None], np.linspace(1000, 200_000, 200)[None]
    swept = sweep(batch=batch, context=context)
    assert swept.shape == (100, 200)
    assert (np.diff(swept, axis=0) > 0).mean() > 0.97  # but where a batch no longer fits the skinny kernels' rows
    assert (np.diff(swept, axis=1) > 0).all()
    for row, column in ((0, 0), (47, 113), (99, 199)):
        assert swept[row, column] == sweep(batch=batch[row, 0], context=context[0, column])


def test_the_expression_prints_and_differentiates(shape, machine, quantspec):
    expression = compile_sweep("tpot_s", shape, machine, *quantspec, ["acceptance"]).expression
    assert r"\alpha" in sympy.latex(expression)
    slope = sympy.diff(expression, symbol("acceptance"))
    assert float(slope.subs(symbol("acceptance"), 0.9)) < 0  # more acceptance, less time


def test_wrong_names_are_named(shape, machine, quantspec, sweep_of):
    with pytest.raises(ValueError, match="'speed'; allowed: tpot_s"):
        compile_sweep("speed", shape, machine, *quantspec, ["gamma"])
    with pytest.raises(ValueError, match="'gama' is not a term"):
        compile_sweep("tpot_s", shape, machine, *quantspec, ["gama"])
    with pytest.raises(ValueError, match="terms are context; needed: batch, context, gamma, acceptance"):
        sweep_of("tpot_s")(context=1)


# Functions of terms give the same for numbers, arrays and symbols, also where both sides are equal.

A, B = sympy.symbols("a b", positive=True)
PAIRS = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]


@pytest.mark.parametrize("name, expected", [("maximum", [2, 2, 3]), ("minimum", [1, 2, 2]), ("indicator", [1, 1, 0])])
def test_of_numbers_arrays_and_symbols(name, expected):
    function = getattr(cost, name)
    first, second = np.array(PAIRS).T
    assert [function(a, b) for a, b in PAIRS] == expected
    np.testing.assert_array_equal(function(first, second), expected)
    assert [float(function(A, B).subs({A: a, B: b})) for a, b in PAIRS] == expected
    compiled = sympy.lambdify([A, B], function(A, B), modules="numpy")
    np.testing.assert_array_equal(compiled(first, second), expected)


def test_where_takes_the_first_where_the_condition_holds():
    assert (cost.where(1, 5, 7), cost.where(0, 5, 7)) == (5, 7)
    np.testing.assert_array_equal(cost.where(np.array([1, 0]), np.array([5, 6]), 7), [5, 7])


def test_what_is_symbolic():
    assert cost.is_symbolic(1, A)
    assert cost.is_symbolic(A)
    assert not cost.is_symbolic(2.0, np.ones(3))
