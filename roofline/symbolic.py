"""The cost model in sympy: symbols with units, printable formulas, and compiled sweeps.

`evaluate` runs once on sympy symbols. Sympy folds the constants, shares common subexpressions, and lambdifies the
result to numpy. A test compares it with `evaluate` on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from ridgeplan.roofline.catalog.files import parse_toml, read_document
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine, StrategyRates
from ridgeplan.roofline.passes import Op, PassTerms, decode_pass
from ridgeplan.roofline.strategy import Strategy

# Letter and unit of a quantity by its name in the code.
UNITS: dict[str, list[str]] = parse_toml(read_document(Path(__file__).with_name("symbols.toml")))


def symbol(name: str) -> sympy.Symbol:
    """The positive symbol of a quantity: its letter in `UNITS`, else its own name."""
    return sympy.Symbol(UNITS.get(name, [name])[0], positive=True)


def unit(name: str) -> str:
    """The unit of a quantity; "" if it is a pure number."""
    return UNITS.get(name, ["", ""])[1]


class SymbolicShape(ModelShape):
    """A model shape whose sizes may be symbols: the same properties without validation."""

    def __post_init__(self) -> None:
        """Skips validation, which symbols would fail."""


LETTERS = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab")


def symbolic_shape(**sizes: Any) -> SymbolicShape:
    """A dense decoder with grouped-query attention in symbols; `sizes` overrides its fields.

    For multi-head attention pass `kv_heads=symbol("q_heads")`.
    """
    letters: dict[str, Any] = {name: symbol(name) for name in LETTERS}
    return SymbolicShape(name="symbolic", architecture="llama", max_context=1, **letters | sizes)


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
    fields_of_shape = {item.name: getattr(shape, item.name) for item in fields(ModelShape)}
    letters = SymbolicShape(**fields_of_shape | {name: symbol(name) for name in LETTERS})
    element_bytes = symbol("element_bytes")
    terms = PassTerms(
        batch=symbol("batch"), queries=sympy.Symbol("q", positive=True), quantized_tokens=0,
        full_tokens=symbol("context"), bits=0, group=1, splits=1, weight_bytes=symbol("target_weight_bytes"),
        head_bytes=element_bytes, element_bytes=element_bytes,
    )  # fmt: skip
    return [_formula(op) for op in decode_pass(letters, terms)]


def _formula(op: Op) -> Formula:
    cost = (op.launches, op.cost.flops, op.cost.read_bytes, op.cost.write_bytes)
    return Formula(op.name, op.kind, *(sympy.factor_terms(sympy.sympify(term)) for term in cost))


FIGURES: dict[str, Callable[[Estimate], Term]] = {
    "tpot_s": lambda estimate: estimate.tpot_s,
    "ttft_s": lambda estimate: estimate.ttft_s,
    "peak_bytes": lambda estimate: estimate.memory.peak,
    "tokens_per_round": lambda estimate: estimate.tokens_per_round,
}
CHUNK = 8192  # plans at once: temporaries of 64 KiB stay in a core's L2 cache


@dataclass(frozen=True)
class Sweep:
    """One figure of a strategy as a function of its varying fields.

    expression: the same to print, export with sympy.latex, differentiate or solve.
    """

    varying: tuple[str, ...]
    expression: sympy.Expr
    function: Callable[..., np.ndarray]

    def __call__(self, **values: Term) -> np.ndarray:
        """The figure at arrays of every varying field, which broadcast. Raises ValueError for others.

        Over a grid, parts of the expression that depend on one field are computed once for each of its values.
        """
        if set(values) != set(self.varying):
            raise ValueError(f"sweep terms are {', '.join(values) or 'none'}; needed: {', '.join(self.varying)}")
        arrays = [np.asarray(values[name], dtype=float) for name in self.varying]
        out = np.empty(np.broadcast_shapes(*(array.shape for array in arrays)))
        if not out.ndim:
            return np.asarray(self.function(*arrays))
        arrays = [array.reshape((1,) * (out.ndim - array.ndim) + array.shape) for array in arrays]
        rows = max(1, CHUNK * len(out) // max(out.size, 1))
        for start in range(0, len(out), rows):
            part = slice(start, start + rows)
            out[part] = self.function(*(array[part] if len(array) > 1 else array for array in arrays))
        return out


def compile_sweep(
    figure: str,
    shape: ModelShape,
    machine: Machine,
    strategy: Strategy,
    rates: StrategyRates,
    varying: Sequence[str],
) -> Sweep:
    """Compile one of `FIGURES` of `strategy`, run at `rates`, as a function of its fields `varying`.

    Raises ValueError for other names.
    """
    if figure not in FIGURES:
        raise ValueError(f"figure is {figure!r}; allowed: {', '.join(FIGURES)}")
    symbols = {name: symbol(name) for name in varying}
    estimate = evaluate(shape, machine, strategy.with_terms(**symbols), rates)
    expression = sympy.sympify(FIGURES[figure](estimate))
    function = sympy.lambdify([*symbols.values()], expression, modules="numpy", cse=True)
    return Sweep(tuple(varying), expression, function)
