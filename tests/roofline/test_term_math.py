"""Functions of terms give the same for numbers, arrays and symbols, also where both sides are equal."""

import numpy as np
import pytest
import sympy

from ridgeplan.roofline import cost

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
    assert not cost.is_symbolic(1, 2.0, np.ones(3))
