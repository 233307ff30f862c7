"""What is measured of one engine: fidelity and perplexity on passages, times and memory, scores on tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.quality.fidelity import Passage, next_logits, overlap, perplexity, surprise
from ridgeplan.validate.quality.question import TIMED_TOKENS, Question
from ridgeplan.validate.ruler.task import Task
from ridgeplan.validate.ruler.tasks import Prompt, PromptMaker

Values = dict[str, float]  # by measure


@dataclass(frozen=True)
class Group:
    """Measures that one pass over the inputs gives, and the number of samples behind them."""

    name: str
    measures: tuple[str, ...]
    samples: int
    run: Callable[[Engine], Values]


class Inputs:
    """Passages and prompts of one context, made once for all plans, and the plain model's logits on the passages."""

    def __init__(self, question: Question, context: int, maker: PromptMaker, plain: Callable[[], Engine]) -> None:
        """plain: opens an engine of plain decoding, which is closed here."""
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
        logits = [next_logits(engine, passage) for passage in self.passages]
        engine.close()
        return logits

    def prompts(self, task: Task) -> list[Prompt]:
        """A task's prompts. Raises TaskError for a context that is too short."""
        one = self._question
        if task.name not in self._prompts:
            tokens = self._context - one.headroom
            made = [self._maker.prompt(task, tokens, index, one.seed) for index in range(one.samples)]
            self._prompts[task.name] = made
        return self._prompts[task.name]

    def groups(self) -> list[Group]:
        """Everything that is measured of a plan."""
        one = self._question
        tasks = [Group(task.name, (task.name,), one.samples, self._answering(task)) for task in one.tasks]
        return [
            Group("text", TEXT_MEASURES, one.passages, self._on_text),
            Group("times", COST_MEASURES, 1, self._times),
            *tasks,
        ]

    def _on_text(self, engine: Engine) -> Values:
        overlaps, surprises = [], []
        for passage, plain in zip(self.passages, self.plain_logits, strict=True):
            logits = next_logits(engine, passage)
            overlaps.append(overlap(plain, logits))
            surprises.append(surprise(logits, passage))
        return {FIDELITY: min(1.0, sum(overlaps) / len(overlaps)), PERPLEXITY: perplexity(surprises)}

    def _times(self, engine: Engine) -> Values:
        """Of the last of two generations on a GPU, where the first compiles kernels."""
        for _ in range(2 if engine.device.type == "cuda" else 1):
            engine.generate(self.passages[0].prompt, TIMED_TOKENS)
        assert engine.cache is not None, "the engine is open"
        return {TTFT: engine.statistics.ttft_ms, TPOT: engine.statistics.tpot_ms, KV_BYTES: float(engine.cache.bytes)}

    def _answering(self, task: Task) -> Callable[[Engine], Values]:
        def run(engine: Engine) -> Values:
            scores = [answer_score(engine, task, prompt) for prompt in self.prompts(task)]
            return {task.name: sum(scores) / len(scores)}

        return run


def answer_score(engine: Engine, task: Task, prompt: Prompt) -> float:
    """The score, from 0 to 1, of the engine's greedy answer."""
    stop = engine.tokenizer.eos_token_id
    sampling = SamplingParams(stop_token_ids=() if stop is None else (stop,))
    tokens: Sequence[int] = engine.generate(prompt.ids, task.new_tokens, sampling).tokens[0]
    return task.score(engine.tokenizer.decode(tokens, skip_special_tokens=True), prompt.answers)
