"""Symbols of the cost model: letters, units, positivity."""

from dataclasses import replace

import pytest
import sympy

from ridgeplan.roofline.strategy import TERM_NAMES, DraftStrategy, Strategy, TargetStrategy
from ridgeplan.roofline.symbolic import symbol, symbolic_shape, unit


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
    with pytest.raises(
        ValueError, match="'speed' is not a term of a strategy; allowed: acceptance, batch, code_planes"
    ):
        strategy.with_terms(speed=1)
