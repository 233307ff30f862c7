"""All tasks by name, and the prompts that a tokenizer makes of their samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ridgeplan.validate.ruler.counting import COUNTING_TASKS
from ridgeplan.validate.ruler.needles import NEEDLE_TASKS
from ridgeplan.validate.ruler.questions import QUESTION_TASKS
from ridgeplan.validate.ruler.task import Material, Sample, Task, TaskError, sample_that_fits
from ridgeplan.validate.ruler.words import sentences_of, words_of

TASKS: dict[str, Task] = {task.name: task for task in (*NEEDLE_TASKS, *COUNTING_TASKS, *QUESTION_TASKS)}


def chosen_tasks(names: Iterable[str]) -> tuple[Task, ...]:
    """The tasks of these names. Raises TaskError for another name."""
    for name in names:
        if name not in TASKS:
            raise TaskError(f"task is {name!r}; allowed: {', '.join(TASKS)}")
    return tuple(TASKS[name] for name in dict.fromkeys(names))


def material(text: str, questions: dict[str, Any] | None = None) -> Material:
    """Haystack and words of a text, and the question sets that are there."""
    return Material(sentences_of(text), words_of(text), questions or {})


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the answers that are wanted."""

    ids: list[int]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of tasks for a model: with its chat template, where its tokenizer has one."""

    tokenizer: Any
    material: Material

    def prompt(self, task: Task, tokens: int, index: int, seed: int) -> Prompt:
        """Sample `index` of a task, whose prompt fills `tokens` tokens as far as whole parts do.

        Raises TaskError where the smallest sample is longer.
        """
        name, ids = f"{task.name} {tokens} {index} {seed}", cache(self.ids)
        sample = sample_that_fits(task, self.material, name, lambda one: len(ids(one)), tokens)
        return Prompt(ids(sample), sample.answers)

    def ids(self, sample: Sample) -> list[int]:
        """Token ids of a sample: the user's message, and the opening of the answer."""
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(f"{sample.prompt}\n{sample.opening}"))
        messages = [{"role": "user", "content": sample.prompt}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text + sample.opening, add_special_tokens=False))
