"""Long outputs: agreement with full attention over the model's own output, and recall of what it wrote.

The plain model continues a prompt by thousands of tokens, drawn at TEMPERATURE, as its greedy output would soon repeat
itself. The same tokens are then forced on every plan, whose cache is filled by decoding them. Greedy agreement is the
share of them after which the plan's most likely token is the plain model's. Behind the output stand questions whose
answer is nowhere but in it: CUE tokens of the output, to be continued by the ANSWER tokens that followed them there. A
score is the share of these that the plan would choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeplan.planner.quality import AGREEMENT, EARLY_RECALL, LATE_RECALL
from ridgeplan.runtime import SamplingParams
from ridgeplan.runtime.engine import Engine

TEMPERATURE = 0.6  # as DeepSeek-R1 recommends against repetition (its README, usage recommendations)
QUESTIONS = 8  # of an output, the first half of them about its first half
CUE, ANSWER = 8, 8  # tokens
QUESTION_TOKENS = QUESTIONS * (CUE + ANSWER) + 1
MIN_LONG_OUTPUT = 2 * QUESTIONS * (CUE + ANSWER)


@dataclass(frozen=True)
class LongOutput:
    """A prompt, the model's own output, where the spans begin that are asked for, and the plain model's choices.

    choices: the plain model's greedy token after each token of the output but the last.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    spans: tuple[int, ...]
    choices: tuple[int, ...] = ()

    @property
    def forced(self) -> tuple[int, ...]:
        """The output, and each question with its answer."""
        questions = (token for start in self.spans for token in self.output[start : start + CUE + ANSWER])
        return (*self.output, *questions)

    def agreement_of(self, chosen: Sequence[int]) -> float:
        """Share of the output's tokens after which `chosen` is the plain model's choice."""
        return sum(token == plain for token, plain in zip(chosen, self.choices, strict=True)) / len(self.choices)

    def scores(self, chosen: Sequence[int]) -> dict[str, float]:
        """All measures of greedy tokens `chosen` after the prompt and after each of the forced tokens."""
        recall, half = list(self._recalled(chosen)), len(self.spans) // 2
        return {
            AGREEMENT: self.agreement_of(self.output_choices(chosen)),
            EARLY_RECALL: sum(recall[:half]) / half,
            LATE_RECALL: sum(recall[half:]) / (len(recall) - half),
        }

    def output_choices(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The greedy tokens after each token of the output but its last.

        chosen: the greedy tokens after the prompt and after each forced token. The first of them comes from prefill,
        which reads everything.
        """
        return tuple(chosen[1 : len(self.output)])

    def _recalled(self, chosen: Sequence[int]) -> Iterator[float]:
        """The score of each question."""
        for number, start in enumerate(self.spans):
            before = len(self.output) + number * (CUE + ANSWER) + CUE  # tokens ahead of the answer, the prompt's aside
            expected = self.output[start + CUE : start + CUE + ANSWER]
            answered = chosen[before : before + ANSWER]
            yield sum(token == other for token, other in zip(answered, expected, strict=True)) / ANSWER


def long_outputs(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[LongOutput]:
    """The outputs of `tokens` tokens of an engine of plain decoding, with its own choices along them."""
    sampling = SamplingParams(temperature=TEMPERATURE, seed=seed)
    written = engine.generate(prompts, tokens, sampling).tokens
    outputs = [
        LongOutput(tuple(prompt), tuple(output), question_spans(prompt, output))
        for prompt, output in zip(prompts, written, strict=True)
    ]
    chosen = engine.teacher_forced_choices(prompts, [output.forced for output in outputs]).tolist()
    return [replace(output, choices=output.output_choices(row)) for output, row in zip(outputs, chosen, strict=True)]


def question_spans(prompt: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
    """Where the spans to ask for begin: evenly spread over the output, each at the next cue that stands there once.

    A cue that stands elsewhere in the prompt or the output, too, has more than one continuation. Where an output has no
    other cue up to the next span, the first place is taken.
    """
    text, first = (*prompt, *output), len(prompt)
    counts: dict[tuple[int, ...], int] = {}
    for start in range(len(text) - CUE + 1):
        cue = text[start : start + CUE]
        counts[cue] = counts.get(cue, 0) + 1
    step = (len(output) - CUE - ANSWER) // QUESTIONS
    spans = []
    for number in range(QUESTIONS):
        places = range(number * step, (number + 1) * step)
        unique = (at for at in places if counts[tuple(text[first + at : first + at + CUE])] == 1)
        spans.append(next(unique, places[0]))
    return tuple(spans)
