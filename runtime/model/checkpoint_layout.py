"""How a family's checkpoint becomes the decoder's weights: constants and orders of channels that loading folds in.

The decoder has one form of a layer: norms that scale by a weight, RoPE that turns channel i with channel
i + head_dim / 2 of each head, softmax scaled by head_dim ** -0.5. What families have beside these costs nothing when it
is part of the weights: multipliers of embeddings, of block outputs and of logits, weights of norms that are offsets
from 1, other pairs of channels, RoPE over a part of a head, and heads of a size that no kernel takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadLayout:
    """Where the channels of a checkpoint's head of `head_dim` stand in the decoder's head of `width`, zeros between.

    rotary_dim: how many of its first channels RoPE turns. interleaved: whether it turns each with the next one.
    """

    head_dim: int
    width: int
    rotary_dim: int
    interleaved: bool = False

    @property
    def places(self) -> list[int]:
        """The place of each channel of queries and keys."""
        half, pairs = self.width // 2, self.rotary_dim // 2
        turned = [
            (channel // 2 + channel % 2 * half) if self.interleaved else (channel % pairs + channel // pairs * half)
            for channel in range(self.rotary_dim)
        ]
        taken = set(turned)
        rest = (place for place in range(self.width) if place not in taken)
        return turned + [next(rest) for _ in range(self.head_dim - self.rotary_dim)]

    @property
    def changes(self) -> bool:
        """Whether the decoder's heads are other than the checkpoint's."""
        return self.width != self.head_dim or self.places != list(range(self.head_dim))

    @property
    def shrinking(self) -> float:
        """By how much zeros shrink the root mean square of a head."""
        return math.sqrt(self.head_dim / self.width)

    def frequencies(self, turned: list[float]) -> tuple[float, ...]:
        """Frequencies [width / 2] of the decoder's head, of those of the pairs that RoPE turns."""
        return (*turned, *[0.0] * (self.width // 2 - len(turned)))

    def rotated(self, rows: Tensor) -> Tensor:
        """Rows [heads * head_dim, ...] of queries or keys as [heads * width, ...]."""
        return self._placed(rows, self.places) if self.changes else rows

    def padded(self, rows: Tensor) -> Tensor:
        """Rows [heads * head_dim, ...] of values, or of the transposed output projection, as [heads * width, ...]."""
        return rows if self.width == self.head_dim else self._placed(rows, list(range(self.head_dim)))

    def _placed(self, rows: Tensor, places: list[int]) -> Tensor:
        heads = rows.unflatten(0, (-1, self.head_dim))
        placed = heads.new_zeros(len(heads), self.width, *heads.shape[2:])
        placed[:, torch.tensor(places)] = heads
        return placed.flatten(0, 1)


@dataclass(frozen=True)
class CheckpointLayout:
    """What loading does to a family's checkpoint.

    norms, state_norms: where norms stand (`families.NORM_NAMES`), and in layers with a state. norm_offset, layer_norm:
    as in `Family`. eps, state_eps: of all norms, and of those of a state's output.
    stream_scale: s, by which the model multiplies embeddings. The decoder does not, its stream is 1 / s as large: block
    outputs are divided by s, and norms of the stream, which do not see a scale, have eps / s^2. output_scale,
    logit_scale: factors on the blocks' outputs and on the logits. heads: order of a head's channels; None: as it is.
    activation: of the MLP. logit_cap: of the head's soft cap. value_norm: as in `Family`.
    """

    eps: float = 1e-5
    norms: str = "before"
    norm_offset: float = 0.0
    layer_norm: bool = False
    stream_scale: float = 1.0
    output_scale: float = 1.0
    logit_scale: float = 1.0
    heads: HeadLayout | None = None
    activation: str = "silu"
    logit_cap: float | None = None
    value_norm: bool = False
    state_norms: str = "before"
    state_eps: float = 1e-5

    @property
    def stream_eps(self) -> float:
        """Eps of norms of the decoder's stream."""
        return self.eps / self.stream_scale**2

    @property
    def block_scale(self) -> float:
        """Factor on what blocks add to the decoder's stream."""
        return self.output_scale / self.stream_scale

    def norm_weight(self, weight: Tensor, scale: float = 1.0) -> Tensor:
        """A norm's weight times `scale`; in float32 where the model's dtype would round it."""
        return weight if scale == 1 and not self.norm_offset else (weight.float() + self.norm_offset) * scale
