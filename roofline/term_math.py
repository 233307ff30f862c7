"""Functions that accept numbers, numpy arrays and sympy expressions alike."""

from __future__ import annotations

import numpy as np

from ridgeplan.roofline.cost import Term


def is_symbolic(*terms: Term) -> bool:
    """Whether any term is a sympy expression. Does not import sympy, which most callers never need."""
    return any(hasattr(term, "free_symbols") for term in terms)


def maximum(a: Term, b: Term) -> Term:
    """The element-wise maximum of two terms."""
    if is_symbolic(a, b):
        from sympy import Max

        return Max(a, b)
    return np.maximum(a, b)


def minimum(a: Term, b: Term) -> Term:
    """The element-wise minimum of two terms."""
    if is_symbolic(a, b):
        from sympy import Min

        return Min(a, b)
    return np.minimum(a, b)


def hypot(a: Term, b: Term) -> Term:
    """The square root of a^2 + b^2: a smooth maximum of two terms that are not negative."""
    if is_symbolic(a, b):
        from sympy import sqrt

        return sqrt(a**2 + b**2)
    return np.sqrt(a * a + b * b)


def indicator(a: Term, b: Term) -> Term:
    """1 if `a <= b`, else 0."""
    if is_symbolic(a, b):
        from sympy import Heaviside

        return Heaviside(b - a, 1)
    return np.less_equal(a, b) * 1


def where(condition: Term, yes: Term, no: Term) -> Term:
    """Like numpy.where, for a `condition` of 0 or 1; `yes` and `no` must be finite."""
    return condition * yes + (1 - condition) * no
