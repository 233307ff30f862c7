"""The symbols of the cost model, each with its unit; all are positive, so that sympy can simplify and solve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import sympy

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.strategy import Strategy

# Name in the code: letter and unit. Letters follow Table 1 of QuantSpec and of SpeContext where they have one.
UNITS: dict[str, tuple[str, str]] = {
    "batch": ("B", "sequences"),
    "context": ("S", "tokens"),
    "new_tokens": ("k", "tokens"),
    "layers": ("L", "layers"),
    "hidden": ("d", "elements"),
    "q_heads": ("H", "heads"),
    "kv_heads": ("H_kv", "heads"),
    "head_dim": ("D", "elements"),
    "intermediate": ("F", "elements"),
    "vocab": ("V", "tokens"),
    "element_bytes": ("e", "bytes"),
    "gamma": ("gamma", "tokens"),
    "acceptance": ("alpha", "probability"),
    "draft_ratio": ("rho", "share of tokens"),
    "kv_group": ("G", "tokens"),
    "splits": ("N_split", "parts"),
    "target_weight_bytes": ("w_t", "bytes per parameter"),
    "draft_weight_bytes": ("w_d", "bytes per parameter"),
    "target_bits": ("b_t", "bits"),
    "draft_bits": ("b_d", "bits"),
    "code_planes": ("planes", "4-bit planes"),
    "bandwidth_bytes_per_s": ("beta", "bytes/s"),
    "compute_flops": ("pi", "FLOP/s"),
    "memory_bytes": ("M_gpu", "bytes"),
    "host_link_bytes_per_s": ("beta_host", "bytes/s"),
}


def symbol(name: str) -> sympy.Symbol:
    """The positive symbol of a quantity: its letter in `UNITS`, else its own name."""
    return sympy.Symbol(UNITS.get(name, (name, ""))[0], positive=True)


def unit(name: str) -> str:
    """The unit of a quantity; "" if it is a pure number."""
    return UNITS.get(name, ("", ""))[1]


class SymbolicShape(ModelShape):
    """A model shape whose sizes may be symbols: the same properties without validation."""

    def __post_init__(self) -> None:
        """Skips validation, which symbols would fail."""


def symbolic_shape(**sizes: Any) -> SymbolicShape:
    """A dense decoder with grouped-query attention in symbols; `sizes` overrides its fields.

    For multi-head attention pass `kv_heads=symbol("q_heads")`.
    """
    names = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab")
    free: dict[str, Any] = {name: symbol(name) for name in names}
    return SymbolicShape(name="symbolic", architecture="llama", max_context=1, **{**free, **sizes})


def symbolic_strategy(strategy: Strategy, names: Iterable[str]) -> Strategy:
    """`strategy` with the named fields as symbols. Raises ValueError for a field that it does not have."""
    allowed = {field.name for field in fields(Strategy)}
    for name in names:
        if name not in allowed:
            raise ValueError(f"{name!r} is not a term of a strategy; allowed: {', '.join(sorted(allowed))}")
    return replace(strategy, **{name: symbol(name) for name in names})
