"""The cost of an operation: floating-point operations and traffic through device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
