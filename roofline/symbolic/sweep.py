"""Sweeps: the cost model compiled to one function over arrays, for millions of plans per second.

`evaluate` runs once on sympy symbols. Sympy folds the constants, shares common subexpressions, and lambdifies the
result to numpy. A test compares it with `evaluate` on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import sympy

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine, StrategyRates
from ridgeplan.roofline.strategy import Strategy
from ridgeplan.roofline.symbolic.symbols import symbol, symbolic_strategy

FIGURES: dict[str, Callable[[Estimate], Term]] = {
    "tpot_s": lambda estimate: estimate.tpot_s,
    "ttft_s": lambda estimate: estimate.ttft_s,
    "peak_bytes": lambda estimate: estimate.memory.peak,
    "tokens_per_round": lambda estimate: estimate.tokens_per_round,
}
CHUNK = 8192  # plans at once: temporaries of 64 KiB stay in a core's L2 cache


@dataclass(frozen=True)
class Sweep:
    """One figure of a strategy as a function of its varying fields."""

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
    expression = symbolic_figure(figure, shape, machine, strategy, rates, varying)
    symbols = [symbol(name) for name in varying]
    return Sweep(tuple(varying), expression, sympy.lambdify(symbols, expression, modules="numpy", cse=True))


def symbolic_figure(
    figure: str,
    shape: ModelShape,
    machine: Machine,
    strategy: Strategy,
    rates: StrategyRates,
    varying: Sequence[str],
) -> sympy.Expr:
    """The expression behind a sweep: to print, export with sympy.latex, differentiate or solve."""
    estimate = evaluate(shape, machine, symbolic_strategy(strategy, varying), rates)
    return sympy.sympify(FIGURES[figure](estimate))
