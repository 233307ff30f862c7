"""Symbols of the cost model: letters, units, positivity."""

from dataclasses import fields

import pytest
import sympy

from ridgeplan.roofline.strategy import Strategy
from ridgeplan.roofline.symbolic import symbol, symbolic_shape, symbolic_strategy, unit


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
    assert shape.dense_mlp_params == 3 * symbol("hidden") * symbol("intermediate")


def test_any_field_of_a_strategy_may_be_a_symbol_and_nothing_else():
    strategy = Strategy(*(1.0 for _ in fields(Strategy)))
    opened = symbolic_strategy(strategy, ["gamma", "context"])
    assert (opened.gamma, opened.context, opened.batch) == (symbol("gamma"), symbol("context"), 1.0)
    assert opened.queries == symbol("gamma") + 1
    with pytest.raises(
        ValueError, match="'speed' is not a term of a strategy; allowed: acceptance, appended_tokens, batch"
    ):
        symbolic_strategy(strategy, ["speed"])
