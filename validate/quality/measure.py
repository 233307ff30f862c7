"""What is measured of engines: fidelity and perplexity on passages, times and memory, scores on tasks.

The engines of one call share weights and differ in how much they keep, so that each prompt is processed once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from ridgeplan.planner.measured_quality import (
    COST_MEASURES,
    FIDELITY,
    KV_BYTES,
    PERPLEXITY,
    TEXT_MEASURES,
    TPOT,
    TTFT,
)
from ridgeplan.runtime import SamplingParams
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.eviction import Oracle
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.quality.fidelity import Passage, next_logits, overlap, perplexity, surprise
from ridgeplan.validate.quality.question import TIMED_TOKENS, Question
from ridgeplan.validate.ruler.task import Task
from ridgeplan.validate.ruler.tasks import Prompt, PromptMaker

Values = dict[str, float]  # by measure
Asked = tuple[Task, Prompt]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Measures that one pass over the inputs gives, and the number of samples behind them.

    rows: sequences that its engines have room for. run: the values of each engine, at least of the measures named.
    """

    name: str
    measures: tuple[str, ...]
    samples: int
    rows: int
    run: Callable[[Sequence[Engine], Collection[str]], list[Values]]


class Inputs:
    """Passages and prompts of one context, made once for all plans, and the plain model's logits on the passages."""

    def __init__(self, question: Question, context: int, maker: PromptMaker, plain: Callable[[], Engine]) -> None:
        """plain: an engine of plain decoding, which is not closed here."""
        self._question, self._context, self._maker, self._plain = question, context, maker, plain
        self._prompts: dict[str, list[Prompt]] = {}

    @cached_property
    def passages(self) -> list[Passage]:
        """Of the text, spread over it. Raises PromptError for a text that is too short."""
        one = self._question
        length = self._context - one.headroom + one.tokens + 1
        batch = prompt_batch(self._maker.tokenizer, length, one.passages, one.text)
        return [Passage.split(ids, one.tokens) for ids in batch]

    @cached_property
    def plain_logits(self) -> list[Tensor]:
        """float32 [tokens, vocab] of each passage."""
        engine = self._plain()
        return [one for part in parts(self.passages, self._question.rows) for one in next_logits(engine, part)]

    def prompts(self, task: Task) -> list[Prompt]:
        """A task's prompts. Raises TaskError for a context that is too short."""
        one = self._question
        if task.name not in self._prompts:
            tokens = self._context - one.headroom
            made = [self._maker.prompt(task, tokens, index, one.seed) for index in range(one.samples)]
            self._prompts[task.name] = made
        return self._prompts[task.name]

    @cached_property
    def groups(self) -> list[Group]:
        """Everything that is measured of a plan: tasks together, as far as a batch holds their prompts."""
        one = self._question
        text = Group("text", TEXT_MEASURES, one.passages, one.rows, self._on_text)
        return [text, Group("times", COST_MEASURES, 1, 1, self._times), *self._task_groups()]

    def _task_groups(self) -> Iterator[Group]:
        one = self._question
        for together in parts(one.tasks, max(1, one.batch // one.samples)):
            names = tuple(task.name for task in together)
            yield Group(" ".join(names), names, one.samples, one.rows, self._answering(together))

    def _on_text(self, engines: Sequence[Engine], _: Collection[str]) -> list[Values]:
        found: list[list[tuple[float, float]]] = [[] for _ in engines]
        pairs = list(zip(self.passages, self.plain_logits, strict=True))
        for part in parts(pairs, self._question.rows):
            passages = [passage for passage, _ in part]
            tell_oracles(engines, passages)
            share_prefill(engines, [one.prompt for one in passages], self._question.tokens + 1)
            for engine, figures in zip(engines, found, strict=True):
                logits = zip(part, next_logits(engine, passages), strict=True)
                figures += [(overlap(plain, own), surprise(own, passage)) for (passage, plain), own in logits]
        return [text_values(figures) for figures in found]

    def _times(self, engines: Sequence[Engine], _: Collection[str]) -> list[Values]:
        prompt = self.passages[0].prompt
        if engines[0].device.type == "cuda":
            warm(engines, prompt)
        return [times(engine, prompt) for engine in engines]

    def _answering(self, tasks: Sequence[Task]) -> Callable[[Sequence[Engine], Collection[str]], list[Values]]:
        def run(engines: Sequence[Engine], wanted: Collection[str]) -> list[Values]:
            asked = [(task, prompt) for task in tasks if task.name in wanted for prompt in self.prompts(task)]
            found = [answer_scores(engines, part, self._maker.tokenizer) for part in parts(asked, self._question.rows)]
            return [mean_scores(asked, [score for part in found for score in part[at]]) for at in range(len(engines))]

        return run


def tell_oracles(engines: Sequence[Engine], passages: Sequence[Passage]) -> None:
    """Tells engines whose eviction is an oracle what follows each prompt."""
    for engine in engines:
        if isinstance(engine.eviction, Oracle):
            for one in passages:
                engine.eviction.tell(one.prompt, one.continuation)


def text_values(figures: Sequence[tuple[float, float]]) -> Values:
    """Of the overlap and the surprise of each passage."""
    overlaps, surprises = zip(*figures, strict=True)
    return {FIDELITY: min(1.0, sum(overlaps) / len(overlaps)), PERPLEXITY: perplexity(surprises)}


def warm(engines: Sequence[Engine], prompt: Sequence[int]) -> None:
    """Generates as `times` does, so that kernels are compiled and graphs captured; the prompt is processed once."""
    share_prefill(engines, [prompt], TIMED_TOKENS)
    for engine in engines:
        engine.generate(prompt, TIMED_TOKENS)


def times(engine: Engine, prompt: Sequence[int]) -> Values:
    """Of a generation from the prompt on, and the bytes of the cache."""
    engine.generate(prompt, TIMED_TOKENS)
    assert engine.cache is not None, "the engine is open"
    return {TTFT: engine.statistics.ttft_ms, TPOT: engine.statistics.tpot_ms, KV_BYTES: float(engine.cache.bytes)}


def share_prefill(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Processes prompts once for engines that then go on from them."""
    first, *others = engines
    if others:
        first.prefill_with(others, prompts, new_tokens)


def answer_scores(engines: Sequence[Engine], asked: Sequence[Asked], tokenizer: Any) -> list[list[float]]:
    """For each engine the score, from 0 to 1, of its greedy answer to each prompt; all answers in one batch."""
    prompts, new_tokens = [prompt.ids for _, prompt in asked], max(task.new_tokens for task, _ in asked)
    stop = tokenizer.eos_token_id
    sampling = SamplingParams(stop_token_ids=() if stop is None else (stop,))
    share_prefill(engines, prompts, new_tokens)
    answers = [engine.generate(prompts, new_tokens, sampling).tokens for engine in engines]
    return [
        [_score(task, prompt, tokens, tokenizer) for (task, prompt), tokens in zip(asked, of_one, strict=True)]
        for of_one in answers
    ]


def _score(task: Task, prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> float:
    """Of an answer, which other tasks of its batch may have let grow beyond what this one allows."""
    return task.score(tokenizer.decode(tokens[: task.new_tokens], skip_special_tokens=True), prompt.answers)


def mean_scores(asked: Sequence[Asked], scores: Sequence[float]) -> Values:
    """The mean score of each task."""
    by_task: dict[str, list[float]] = {}
    for (task, _), score in zip(asked, scores, strict=True):
        by_task.setdefault(task.name, []).append(score)
    return {name: sum(found) / len(found) for name, found in by_task.items()}


def parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in order, up to `most` at a time."""
    return (items[start : start + most] for start in range(0, len(items), most))
