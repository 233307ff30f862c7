"""GGUF's quantized types that products read as they are stored, by their numbers in the file (ggml/include/ggml.h)."""

from __future__ import annotations

from dataclasses import dataclass

NESTED_GROUP = 256  # weights of a block of blocks, whose groups have integers for scales


@dataclass(frozen=True)
class BlockFormat:
    """A quantized type whose products read its blocks: w = scale (code - offset) - minimum, of `group` weights each.

    has_minima: otherwise minima are 0. nested: scales and minima are 8-bit integers times a float16 of 256 weights, of
    which files hold those of Q4_K and Q5_K in 6 bits; else they are float16.
    """

    bits: int
    group: int
    offset: int = 0
    has_minima: bool = False
    nested: bool = False

    @property
    def held_bits(self) -> float:
        """Bits per weight in memory."""
        each = 8 / self.group + 16 / NESTED_GROUP if self.nested else 16 / self.group
        return self.bits + each * (1 + self.has_minima)


BLOCK_FORMATS = {
    2: BlockFormat(4, 32, offset=8),  # Q4_0
    3: BlockFormat(4, 32, has_minima=True),  # Q4_1
    6: BlockFormat(5, 32, offset=16),  # Q5_0
    7: BlockFormat(5, 32, has_minima=True),  # Q5_1
    8: BlockFormat(8, 32),  # Q8_0
    12: BlockFormat(4, 32, has_minima=True, nested=True),  # Q4_K
    13: BlockFormat(5, 32, has_minima=True, nested=True),  # Q5_K
    14: BlockFormat(6, 16, offset=32, nested=True),  # Q6_K
}
