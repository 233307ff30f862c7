"""QuantSpec's Table 1: asymptotic FLOPs, memory operations and arithmetic intensity, derived from the exact costs.

Batch B, context S and hidden dimension d grow. The number of layers, the head dimension, the ratio of the MLP's width
to d and the size of an element are constants. The output head and non-linear operations are left out, as in the paper
(section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.passes import Op, PassTerms, decode_pass, prefill_pass
from ridgeplan.roofline.symbolic import symbol, symbolic_shape

GROWING = ("batch", "context", "hidden", "new_tokens")


@dataclass(frozen=True)
class Asymptotic:
    """Leading terms of one column of Table 1, without coefficients."""

    flops: sympy.Expr
    bytes: sympy.Expr

    @property
    def intensity(self) -> sympy.Expr:
        """FLOPs over memory operations, simplified."""
        return sympy.cancel(self.flops / self.bytes)


def table_1() -> dict[tuple[str, str], Asymptotic]:
    """The six columns by phase ("prefill", "decode") and category ("linear", "attention", "aggregate")."""
    return {
        (phase, category): asymptotic(ops)
        for phase, passes in (("prefill", _prefill()), ("decode", _decode()))
        for category, ops in categories(passes).items()
    }


def categories(ops: Iterable[Op]) -> dict[str, Cost]:
    """Costs of the linear layers, of attention, and of both together, without the output head."""
    linear, attention = Cost(), Cost()
    for op in ops:
        if op.category == "attention":
            attention += op.total
        elif op.category == "linear" and op.kind != "head":
            linear += op.total
    return {"linear": linear, "attention": attention, "aggregate": linear + attention}


def asymptotic(cost: Cost) -> Asymptotic:
    """Leading terms of an exact cost."""
    return Asymptotic(leading_terms(cost.flops), leading_terms(cost.bytes))


def leading_terms(expression: sympy.Expr) -> sympy.Expr:
    """The sum of those monomials in the growing symbols that no other dominates, without coefficients.

    A monomial dominates its divisors, as every growing quantity is at least 1.
    """
    growing = [symbol(name) for name in GROWING]
    polynomial = sympy.Poly(sympy.expand(expression), *growing)
    powers = [power for power, _ in polynomial.terms()]
    kept = [power for power in powers if not any(power != other and _divides(power, other) for other in powers)]
    return sympy.Add(*(sympy.Mul(*map(sympy.Pow, growing, power)) for power in kept))


def _divides(power: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(small <= large for small, large in zip(power, other, strict=True))


def _multi_head_shape() -> ModelShape:
    """Multi-head attention whose heads fill the hidden dimension, and an MLP in a fixed ratio to it."""
    hidden, head_dim = symbol("hidden"), symbol("head_dim")
    heads = hidden / head_dim
    ratio = sympy.Symbol("mlp_ratio", positive=True)
    return symbolic_shape(q_heads=heads, kv_heads=heads, intermediate=ratio * hidden)


def _prefill() -> tuple[Op, ...]:
    return prefill_pass(_multi_head_shape(), symbol("batch"), symbol("context"), symbol("element_bytes"))


def _decode() -> tuple[Op, ...]:
    """k steps at context S, as the paper counts generation of k tokens where k is small against S."""
    terms = PassTerms.plain(symbol("batch"), symbol("context"), symbol("element_bytes"), splits=symbol("splits"))
    steps = symbol("new_tokens")
    passes = decode_pass(_multi_head_shape(), terms)
    return tuple(Op(op.name, op.kind, op.cost, op.launches * steps) for op in passes)
