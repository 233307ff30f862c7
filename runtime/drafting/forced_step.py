"""A teacher-forced step of the target, as replays of one captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeplan.runtime.drafting.round_runner import WARM_ROUNDS
from ridgeplan.runtime.kv.cache import Cache


class GraphedStep:
    """A step over one token of each row. The step may advance the cache; while it is captured no row is active."""

    def __init__(self, step: Callable[[Tensor], Tensor], cache: Cache) -> None:
        """step: makes logits [rows, 1, vocab] of tokens int64 [rows, 1], without waiting for the device."""
        self._tokens = torch.zeros(cache.rows, 1, dtype=torch.int64, device=cache.lengths.device)
        with cache.all_stopped():
            for _ in range(WARM_ROUNDS):
                step(self._tokens)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step(self._tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The step's logits of the next tokens [rows, 1]."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()
