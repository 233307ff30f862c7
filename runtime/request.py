"""A validated request, and the state of its sequences during generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.runtime.errors import WorkloadError, require_whole
from ridgeplan.runtime.sampling import SamplingParams

Prompts = Sequence[Sequence[int]] | Sequence[int] | Tensor


@dataclass(frozen=True)
class Request:
    """A generation request. Raises WorkloadError for values out of range; `check` adds the engine's limits."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: SamplingParams

    @classmethod
    def build(cls, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams | None) -> Request:
        """A request from one prompt or several, as lists or as a tensor; greedy without `sampling`."""
        return cls(_prompts(prompts), max_new_tokens, sampling or SamplingParams())

    def __post_init__(self) -> None:
        require_whole("max_new_tokens", self.max_new_tokens, 1, None)
        if not self.prompts:
            raise WorkloadError("no prompt was given; allowed: one or more")
        for index, prompt in enumerate(self.prompts, 1):
            if not prompt:
                raise WorkloadError(f"prompt {index} is empty; allowed: one token or more")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence when it ends."""
        return max(map(len, self.prompts)) + self.max_new_tokens

    def check(self, workload: Workload, vocab: int) -> None:
        """Raises WorkloadError for values that the plan's workload or the vocabulary does not allow."""
        _require_most("the batch", len(self.prompts), workload.batch)
        _require_most("max_new_tokens", self.max_new_tokens, workload.new_tokens)
        for index, prompt in enumerate(self.prompts, 1):
            _require_most(f"the length of prompt {index}", len(prompt), workload.context)
            for token in prompt:
                require_whole(f"a token of prompt {index}", token, 0, vocab - 1)


@dataclass
class SequenceState:
    """One sequence during generation."""

    prompt_tokens: int
    limit: int
    stop_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens that rounds kept, including those past a stop token
    stopped: bool = False

    @property
    def left(self) -> int:
        """New tokens until the limit."""
        return 0 if self.stopped else self.limit - len(self.tokens)

    @property
    def stored(self) -> int:
        """Tokens in the cache, as far as the host knows."""
        return self.prompt_tokens + self.cached

    @property
    def done(self) -> bool:
        """Whether it has reached its limit or a stop token."""
        return self.left == 0

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """Appends tokens up to the limit or through a stop token; returns those appended."""
        start = len(self.tokens)
        for token in tokens:
            if self.done:
                break
            self.tokens.append(token)
            self.stopped = token in self.stop_token_ids
        return self.tokens[start:]


def _prompts(prompts: Prompts) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompts, Tensor):
        if prompts.is_floating_point() or prompts.dim() not in (1, 2):
            kind = f"{prompts.dtype} of {prompts.dim()} dimensions"
            raise WorkloadError(f"prompts are {kind}; allowed: integers of 1 or 2 dimensions")
        prompts = prompts.tolist()
    _require_tokens("prompts are", prompts)
    if not prompts:
        return ()
    several = isinstance(prompts[0], (Sequence, Tensor))
    nested: Any = [row.tolist() if isinstance(row, Tensor) else row for row in prompts] if several else [prompts]
    for index, prompt in enumerate(nested, 1):
        _require_tokens(f"prompt {index} is", prompt)
    return tuple(map(tuple, nested))


def _require_tokens(what: str, value: object) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise WorkloadError(f"{what} of type {type(value).__name__}; allowed: token ids, not text")


def _require_most(name: str, value: int, high: int) -> None:
    if value > high:
        raise WorkloadError(f"{name} is {brief(value)}; allowed by the plan: up to {high}")
