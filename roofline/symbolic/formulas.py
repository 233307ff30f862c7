"""The cost of every operation of a decode pass as formulas in the letters of the symbols."""

from __future__ import annotations

from dataclasses import dataclass, fields

import sympy

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.passes import Op, PassTerms, decode_pass
from ridgeplan.roofline.symbolic.symbols import SymbolicShape, symbol

LETTERS = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab")


@dataclass(frozen=True)
class Formula:
    """One operation's launches in a pass, and the FLOPs and bytes of one of them."""

    op: str
    kind: str
    launches: sympy.Expr
    flops: sympy.Expr
    read_bytes: sympy.Expr
    write_bytes: sympy.Expr


def decode_formulas(shape: ModelShape) -> list[Formula]:
    """The operations of a decode pass of q queries per sequence that reads S tokens in full precision.

    Sizes that a dense decoder with grouped-query attention has are letters; those of experts, latent attention and
    windows are the model's numbers.
    """
    letters = _letters(shape)
    element_bytes = symbol("element_bytes")
    terms = PassTerms(
        batch=symbol("batch"), queries=sympy.Symbol("q", positive=True), quantized_tokens=0,
        full_tokens=symbol("context"), bits=0, group=1, splits=1, weight_bytes=symbol("target_weight_bytes"),
        head_bytes=element_bytes, element_bytes=element_bytes,
    )  # fmt: skip
    return [_formula(op) for op in decode_pass(letters, terms)]


def _letters(shape: ModelShape) -> SymbolicShape:
    """The shape with letters for the sizes that every decoder has."""
    letters = {name: symbol(name) for name in LETTERS}
    return SymbolicShape(**{one.name: getattr(shape, one.name) for one in fields(ModelShape)} | letters)


def _formula(op: Op) -> Formula:
    cost = (op.launches, op.cost.flops, op.cost.read_bytes, op.cost.write_bytes)
    return Formula(op.name, op.kind, *(sympy.factor_terms(sympy.sympify(one)) for one in cost))
