"""How a request wants its tokens chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ridgeplan.kernels.sampling import filter_logits
from ridgeplan.kernels.sampling.distribution import Choice
from ridgeplan.runtime.errors import WorkloadError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. Draft and target are filtered alike."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, "a finite number of 0 or more")
        if self.temperature < 0:
            raise WorkloadError(f"temperature is {self.temperature}; allowed: a finite number of 0 or more")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise WorkloadError(f"top_k is {self.top_k!r}; allowed: a whole number of 1 or more, or None")
        if self.top_p is not None:
            _require_number("top_p", self.top_p, "above 0 up to 1, or None")
            if not 0 < self.top_p <= 1:
                raise WorkloadError(f"top_p is {self.top_p}; allowed: above 0 up to 1, or None")

    def choice(self, logits: Tensor) -> Choice:
        """What tokens are drawn from, of logits [..., vocab]."""
        return filter_logits(logits, self.temperature, self.top_k, self.top_p)


def _require_number(name: str, value: object, allowed: str) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value):  # type: ignore[arg-type]
        raise WorkloadError(f"{name} is {value!r}; allowed: {allowed}")
