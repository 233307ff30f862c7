"""Cost of an operation, and arithmetic that accepts numbers, numpy arrays and sympy expressions alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# A term is an int, a float, a numpy array or a sympy expression: the formulas are plain arithmetic.
Term = Any


@dataclass(frozen=True)
class Cost:
    """FLOPs and device-memory traffic in bytes, of one launch or the sum of several."""

    flops: Term = 0
    read_bytes: Term = 0
    write_bytes: Term = 0

    @property
    def bytes(self) -> Term:
        """Reads and writes of device memory."""
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> Term:
        """Arithmetic intensity in FLOP/byte (QuantSpec, section 3.1)."""
        return self.flops / self.bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
        )

    def __mul__(self, times: Term) -> Cost:
        return Cost(self.flops * times, self.read_bytes * times, self.write_bytes * times)

    __rmul__ = __mul__


def is_symbolic(a: Term, b: Term = 0.0) -> bool:
    """Whether a term is a sympy expression. Does not import sympy, which most callers never need."""
    return hasattr(a, "free_symbols") or hasattr(b, "free_symbols")


def maximum(a: Term, b: Term) -> Term:
    """The element-wise maximum of two terms."""
    return _extreme("Max", a, b) if is_symbolic(a, b) else np.maximum(a, b)


def minimum(a: Term, b: Term) -> Term:
    """The element-wise minimum of two terms."""
    return _extreme("Min", a, b) if is_symbolic(a, b) else np.minimum(a, b)


def _extreme(kind: str, a: Term, b: Term) -> Term:
    """sympy's Max or Min, decided where the sign of a - b is known.

    By itself sympy compares all parts of both sides, which makes a round's formulas five times as slow to build.
    """
    import sympy

    difference = a - b
    if difference.is_nonnegative or difference.is_nonpositive:
        return a if bool(difference.is_nonnegative) == (kind == "Max") else b
    return getattr(sympy, kind)(a, b, evaluate=False)


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
