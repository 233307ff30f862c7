"""Sampling parameters of a request, and its stop tokens."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ridgeplan.kernels.sampling import filter_logits
from ridgeplan.kernels.sampling.reference import Choice
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.errors import ModelError, WorkloadError, require_whole

MAX_SEED = 2**63 - 1
# Differences of logits are divided by the temperature in float32, which must neither overflow nor underflow.
COLDEST, HOTTEST = 1e-4, 1e4


@dataclass(frozen=True)
class SamplingParams:
    """Temperature (0 is greedy), top-k and top-p, which apply to drafts and target alike.

    seed: keys the random numbers together with a sequence's row and position. So a row's tokens do not depend on the
    other rows, as long as gamma does not. Rounding does depend on the batch's size: where drafts compute in bfloat16,
    as 4-bit weights on a CPU do, other tokens may be drawn in another batch, from the same distribution.
    stop_token_ids: tokens that end a sequence, as its last token. Raises WorkloadError for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_token_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        allowed = f"0, which is greedy, or {COLDEST:g} to {HOTTEST:g}"
        _require_number("temperature", self.temperature, allowed)
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise WorkloadError(f"temperature is {brief(self.temperature)}; allowed: {allowed}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise WorkloadError(f"top_k is {brief(self.top_k)}; allowed: a whole number of 1 or more, or None")
        if self.top_p is not None:
            _require_number("top_p", self.top_p, "above 0 up to 1, or None")
            if not 0 < self.top_p <= 1:
                raise WorkloadError(f"top_p is {brief(self.top_p)}; allowed: above 0 up to 1, or None")
        require_whole("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.stop_token_ids, Collection):
            raise WorkloadError(f"stop_token_ids is {brief(self.stop_token_ids)}; allowed: several token ids")
        for token in self.stop_token_ids:
            require_whole("a stop token", token, 0, None)

    @property
    def graph_key(self) -> tuple[float, int | None, float | None]:
        """The parameters that are constants of a captured round."""
        return self.temperature, self.top_k, self.top_p

    def choice(self, logits: Tensor) -> Choice:
        """The distribution that tokens are drawn from, given logits [..., vocab]."""
        return filter_logits(logits, self.temperature, self.top_k, self.top_p)


def _require_number(name: str, value: object, allowed: str) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        raise WorkloadError(f"{name} is {brief(value)}; allowed: {allowed}")


def all_finite(logits: Tensor) -> Tensor:
    """Whether rows of logits [..., vocab] have no NaN and a finite peak, bool [...]; some logits may be -inf."""
    peak = logits.amax(-1)  # NaN if any logit is NaN
    return peak - peak == 0


def require_finite(finite: Sequence[bool]) -> None:
    """Raises ModelError for the first sequence with logits that are not finite."""
    if not all(finite):
        raise ModelError(
            f"the model's logits are NaN or infinite for sequence {finite.index(False)}, so that no token can be "
            "drawn; allowed: weights and a dtype that keep them finite"
        )
