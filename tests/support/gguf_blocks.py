"""Random tensors of GGUF's quantized types, packed as ggml-quants.h and ggml-common.h define them."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

Packed = tuple[np.ndarray, np.ndarray]  # bytes [blocks, bytes of one], and the values [blocks, weights of one]


def random_blocks(kind: str, rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """The bytes [rows, bytes of a row] of a random matrix, and its values in float32 [rows, columns]."""
    weights, pack = BLOCKS[kind]
    content, values = pack(np.random.default_rng(rows + columns), rows * columns // weights)
    return content.reshape(rows, -1), torch.from_numpy(values.astype(np.float32)).reshape(rows, columns)


def scale(random: Generator, blocks: int) -> np.ndarray:
    """Scales of blocks [blocks, 1], in float16."""
    return random.uniform(1e-4, 2e-3, (blocks, 1)).astype(np.float16)


def q8_0(random: Generator, blocks: int) -> Packed:
    """d, 32 codes: d q."""
    d, codes = scale(random, blocks), random.integers(-128, 128, (blocks, 32), dtype=np.int8)
    return joined(d, codes), d.astype(float) * codes


def q4_0(random: Generator, blocks: int) -> Packed:
    """d, 16 bytes, each of a code and the one 16 after it: d (q - 8)."""
    d, codes = scale(random, blocks), random.integers(0, 16, (blocks, 32), dtype=np.uint8)
    return joined(d, codes[:, :16] | codes[:, 16:] << 4), d.astype(float) * (codes.astype(float) - 8)


def q4_1(random: Generator, blocks: int) -> Packed:
    """d, m, 16 bytes as Q4_0's: d q + m."""
    d, minimum = scale(random, blocks), scale(random, blocks)
    codes = random.integers(0, 16, (blocks, 32), dtype=np.uint8)
    return joined(d, minimum, codes[:, :16] | codes[:, 16:] << 4), d.astype(float) * codes + minimum.astype(float)


def fives(codes: np.ndarray) -> np.ndarray:
    """4 bytes of the highest bits of 32 codes of 5 bits, then 16 bytes of the others as Q4_0's."""
    low, high = codes & 15, codes >> 4
    bits = sum(high[:, index].astype(np.uint32) << index for index in range(32))
    return joined(np.asarray(bits, dtype=np.uint32)[:, None], low[:, :16] | low[:, 16:] << 4)


def q5_0(random: Generator, blocks: int) -> Packed:
    """d, and codes of 5 bits: d (q - 16)."""
    d, codes = scale(random, blocks), random.integers(0, 32, (blocks, 32), dtype=np.uint8)
    return joined(d, fives(codes)), d.astype(float) * (codes.astype(float) - 16)


def q5_1(random: Generator, blocks: int) -> Packed:
    """d, m, and codes of 5 bits: d q + m."""
    d, minimum = scale(random, blocks), scale(random, blocks)
    codes = random.integers(0, 32, (blocks, 32), dtype=np.uint8)
    return joined(d, minimum, fives(codes)), d.astype(float) * codes + minimum.astype(float)


def nested(random: Generator, blocks: int, bits: int) -> Packed:
    """Q4_K, or Q5_K, which has 32 bytes of highest bits ahead of the codes: byte l has those of the codes l."""
    d, minimum = scale(random, blocks), scale(random, blocks)
    scales, minima = (random.integers(0, 64, (blocks, 8), dtype=np.uint8) for _ in range(2))
    codes = random.integers(0, 1 << bits, (blocks, 8, 32), dtype=np.uint8)
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | minima[:, 4:] << 4
    low, high = codes & 15, codes >> 4
    highest = np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    above = [highest] if bits == 5 else []
    content = joined(d, minimum, first, second, third, *above, low[:, ::2] | low[:, 1::2] << 4)
    values = (d.astype(float) * scales)[:, :, None] * codes - (minimum.astype(float) * minima)[:, :, None]
    return content, values


def q4_k(random: Generator, blocks: int) -> Packed:
    """d, dmin, 12 bytes of 8 scales and 8 minima of 6 bits, 128 bytes of 8 sub-blocks of 32 codes: d s q - dmin m."""
    return nested(random, blocks, 4)


def q5_k(random: Generator, blocks: int) -> Packed:
    """The same with codes of 5 bits."""
    return nested(random, blocks, 5)


def q6_k(random: Generator, blocks: int) -> Packed:
    """The lower 4 bits of 256 codes, their upper 2 bits, 16 scales, d: d s (q - 32), in two halves of 4 x 32 codes."""
    d, scales = scale(random, blocks), random.integers(-128, 128, (blocks, 16), dtype=np.int8)
    codes = random.integers(0, 64, (blocks, 2, 4, 32), dtype=np.uint8)
    low, high = codes & 15, codes >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    steps = (d.astype(float) * scales)[:, :, None]
    return joined(lower, upper, scales, d), steps * (codes.reshape(blocks, 16, 16).astype(float) - 32)


def f16(random: Generator, blocks: int) -> Packed:
    """Numbers of their own, without scales."""
    values = random.normal(0, 0.01, (blocks, 1)).astype(np.float16)
    return joined(values), values


def bf16(random: Generator, blocks: int) -> Packed:
    """The upper halves of numbers in float32."""
    halves = random.normal(0, 0.01, (blocks, 1)).astype(np.float32).view(np.uint32) >> 16
    return joined(halves.astype(np.uint16)), (halves << 16).view(np.float32)


def joined(*parts: np.ndarray) -> np.ndarray:
    """The bytes of all parts of each block, one part after the other."""
    return np.concatenate([np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in parts], axis=1)


# By GGUF's name of the type: weights of a block, and how one is packed.
BLOCKS: dict[str, tuple[int, Callable[[Generator, int], Packed]]] = {
    "Q8_0": (32, q8_0),
    "Q4_0": (32, q4_0),
    "Q4_1": (32, q4_1),
    "Q5_0": (32, q5_0),
    "Q5_1": (32, q5_1),
    "Q4_K": (256, q4_k),
    "Q5_K": (256, q5_k),
    "Q6_K": (256, q6_k),
    "F16": (1, f16),
    "BF16": (1, bf16),
}
