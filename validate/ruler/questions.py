"""Two question tasks over documents among distractors: SQuAD 2.0 and HotpotQA (RULER, section 3.4)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from ridgeplan.validate.ruler.task import Material, QuestionSet, Sample, Task

ANSWER_TOKENS = 32
SQUAD, HOTPOT = "squad", "hotpotqa"


def question(name: str, material: Material, size: int, generator: random.Random) -> Sample:
    """A question, and `size` documents beside those that hold its answer, in random order."""
    known = material.questions[name]
    text, answers, own = generator.choice(known.questions)
    others = [
        index for index in generator.sample(range(len(known.documents)), len(known.documents)) if index not in own
    ]
    chosen = [*own, *others[:size]]
    chosen.extend(generator.choices(others, k=size + len(own) - len(chosen)))  # more than there are: some again
    generator.shuffle(chosen)
    documents = "\n\n".join(f"Document {at}:\n{known.documents[one]}" for at, one in enumerate(chosen, start=1))
    asks = "Answer the question from the documents. Give the answer alone, in a few words."
    return Sample(f"{asks}\n\n{documents}\n\n{asks}\n\nQuestion: {text}", "Answer:", answers)


def squad_questions(data: Any) -> QuestionSet:
    """From SQuAD 2.0's JSON: paragraphs, and the questions that they answer. Raises KeyError for other data."""
    paragraphs = [one for article in data["data"] for one in article["paragraphs"]]
    asked = tuple(
        (qa["question"], tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])), (index,))
        for index, paragraph in enumerate(paragraphs)
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    )
    return QuestionSet(tuple(one["context"] for one in paragraphs), asked)


def hotpot_questions(data: Any) -> QuestionSet:
    """From HotpotQA's JSON: titled documents, and questions with all of their documents. Raises KeyError."""
    numbers: dict[str, int] = {}
    asked = tuple(
        (one["question"], (one["answer"],), tuple(numbers.setdefault(text, len(numbers)) for text in _documents(one)))
        for one in data
    )
    return QuestionSet(tuple(numbers), asked)


def _documents(entry: Any) -> Iterator[str]:
    for title, sentences in entry["context"]:
        yield f"{title}\n{''.join(sentences)}"


QUESTION_TASKS = (
    Task("qa_1", partial(question, SQUAD), ANSWER_TOKENS, any_answer=True, data=SQUAD),
    Task("qa_2", partial(question, HOTPOT), ANSWER_TOKENS, any_answer=True, data=HOTPOT),
)
