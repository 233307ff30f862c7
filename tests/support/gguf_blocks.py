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


def q4_k(random: Generator, blocks: int) -> Packed:
    """d, dmin, 12 bytes of 8 scales and 8 minima of 6 bits, 128 bytes of 8 sub-blocks of 32 codes: d s q - dmin m."""
    d, minimum = scale(random, blocks), scale(random, blocks)
    scales, minima = (random.integers(0, 64, (blocks, 8), dtype=np.uint8) for _ in range(2))
    codes = random.integers(0, 16, (blocks, 8, 32), dtype=np.uint8)
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | minima[:, 4:] << 4
    content = joined(d, minimum, first, second, third, codes[:, ::2] | codes[:, 1::2] << 4)
    values = (d.astype(float) * scales)[:, :, None] * codes - (minimum.astype(float) * minima)[:, :, None]
    return content, values


def q6_k(random: Generator, blocks: int) -> Packed:
    """The lower 4 bits of 256 codes, their upper 2 bits, 16 scales, d: d s (q - 32), in two halves of 4 x 32 codes."""
    d, scales = scale(random, blocks), random.integers(-128, 128, (blocks, 16), dtype=np.int8)
    codes = random.integers(0, 64, (blocks, 2, 4, 32), dtype=np.uint8)
    low, high = codes & 15, codes >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    steps = (d.astype(float) * scales)[:, :, None]
    return joined(lower, upper, scales, d), steps * (codes.reshape(blocks, 16, 16).astype(float) - 32)


def joined(*parts: np.ndarray) -> np.ndarray:
    """The bytes of all parts of each block, one part after the other."""
    return np.concatenate([np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in parts], axis=1)


# By GGUF's name of the type: weights of a block, and how one is packed.
BLOCKS: dict[str, tuple[int, Callable[[Generator, int], Packed]]] = {
    "Q8_0": (32, q8_0),
    "Q4_0": (32, q4_0),
    "Q4_K": (256, q4_k),
    "Q6_K": (256, q6_k),
}
