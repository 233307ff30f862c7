"""The mapping of a small model's heads, channels and RoPE pairs into a larger shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.execution import QUANTIZATION_GROUPS, fitting_group
from ridgeplan.runtime.model_config import DecoderConfig

GROUP = 128  # of a plan's weights, unless it says otherwise
LARGEST_GROUP = max(QUANTIZATION_GROUPS)


class InflationError(ValueError):
    """The small model does not fit into the shape."""


@dataclass(frozen=True)
class ChannelMap:
    """A small decoder and the large shape that holds it."""

    config: DecoderConfig
    shape: ModelShape

    def check(self) -> None:
        """Raises InflationError naming what does not fit."""
        config, shape = self.config.shape, self.shape
        if shape.is_moe or shape.is_mla or shape.window_layers or shape.qk_norm:
            raise InflationError(f"model {shape.name!r} is not a plain dense decoder; allowed: shapes like Llama's")
        if config.window_layers:
            raise InflationError("the small model has a sliding window; allowed: full attention")
        sizes = (
            ("layers", config.layers, shape.layers),
            ("hidden channels and a constant", config.hidden + 1, shape.hidden),
            ("head_dim", config.head_dim, shape.head_dim),
            ("MLP channels", config.intermediate, shape.intermediate),
            ("KV heads, as copies for its query heads", len(self.kv_heads), shape.kv_heads),
        )
        for name, small, large in sizes:
            if small > large:
                raise InflationError(f"the small model needs {small} {name}; allowed by {shape.name!r}: up to {large}")

    @property
    def constant_channel(self) -> int:
        """The channel of the residual stream with the constant.

        It comes first, as GPTQ makes up for errors at a channel in those after it, here none of the small model's.
        """
        return 0

    @property
    def hidden_channels(self) -> Tensor:
        """The channel of the residual stream for each of the small model's: with whole groups of their own if they fit,
        else adjacent.
        """
        placed = _placed(self.config.shape.hidden, self.shape.hidden - LARGEST_GROUP)
        return 1 + torch.arange(self.config.shape.hidden) if placed is None else LARGEST_GROUP + placed

    @property
    def quiet_channels(self) -> int:
        """Leading channels of the residual stream that share groups with the small model's or the constant."""
        return -(-(int(self.hidden_channels[-1]) + 1) // LARGEST_GROUP) * LARGEST_GROUP

    @property
    def mlp_channels(self) -> Tensor:
        """The MLP channel for each of the small model's."""
        small = self.config.shape.intermediate
        placed = _placed(small, self.shape.intermediate)
        return torch.arange(small) if placed is None else placed

    @property
    def q_width(self) -> int:
        """Channels of all query heads."""
        return self.shape.q_heads * self.shape.head_dim

    @property
    def qkv_width(self) -> int:
        """Channels of all query, key and value heads."""
        return self.q_width + 2 * self.shape.kv_heads * self.shape.head_dim

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The small head's RoPE pairs come first; the frequencies of the other pairs do not matter."""
        own = self.config.rotary_frequencies
        return own + (own[-1],) * (self.shape.head_dim // 2 - len(own))

    @property
    def kv_heads(self) -> list[int]:
        """The small KV head in each used large one, copied once per group that its query heads need."""
        return [head for head in range(self.config.shape.kv_heads) for _ in range(self._copies)]

    @property
    def q_heads(self) -> list[int]:
        """The large query head of each small one, in a group whose KV head is a copy of the right one."""
        small, large = self._ratios
        groups = [divmod(index, large) for index in range(small)]
        firsts = [head * self._copies for head in range(self.config.shape.kv_heads)]
        return [(first + group) * large + place for first in firsts for group, place in groups]

    @property
    def qkv_heads(self) -> list[int]:
        """The large heads, counted over queries, keys and values, that hold small ones."""
        used = range(len(self.kv_heads))
        keys = [self.shape.q_heads + head for head in used]
        return [*self.q_heads, *keys, *(self.shape.kv_heads + head for head in keys)]

    @property
    def used_q_channels(self) -> Tensor:
        """All channels of the query heads that hold small ones."""
        return (torch.tensor(self.q_heads)[:, None] * self.shape.head_dim + torch.arange(self.shape.head_dim)).flatten()

    @property
    def value_channels(self) -> Tensor:
        """All channels of the values."""
        return torch.arange(self.qkv_width - self.shape.kv_heads * self.shape.head_dim, self.qkv_width)

    @property
    def small_channels(self) -> Tensor:
        """The small model's query, key or value channel for each of `channels(qkv_heads)`."""
        c = self.config.shape
        keys = [c.q_heads + head for head in self.kv_heads]
        heads = [*range(c.q_heads), *keys, *(c.kv_heads + head for head in keys)]
        return (torch.tensor(heads)[:, None] * c.head_dim + torch.arange(c.head_dim)).flatten()

    def channels(self, heads: list[int]) -> Tensor:
        """Channels of large heads that hold small ones; the two halves of a RoPE pair stay half a head apart."""
        half = torch.arange(self.config.shape.head_dim // 2)
        head = torch.cat([half, half + self.shape.head_dim // 2])
        return (torch.tensor(heads)[:, None] * self.shape.head_dim + head).flatten()

    @property
    def _ratios(self) -> tuple[int, int]:
        small, large = self.config.shape, self.shape
        return small.q_heads // small.kv_heads, large.q_heads // large.kv_heads

    @property
    def _copies(self) -> int:
        small, large = self._ratios
        return math.ceil(small / large)


def _placed(small: int, large: int) -> Tensor | None:
    """Where `small` channels go among `large` so that those with one scale in the small model have one to themselves.

    None where they do not fit.
    """
    own = fitting_group(small, GROUP)
    if own is None or small // own * GROUP > large:
        return None
    return (torch.arange(small // own)[:, None] * GROUP + torch.arange(own)).flatten()
