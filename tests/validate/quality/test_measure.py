"""What is measured together: tasks in one batch, and answers that others of their batch let grow."""

from dataclasses import replace

import pytest

from ridgeplan.planner.quality import KV_BYTES, TPOT, TTFT
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.runtime import load
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.validate.quality import measure
from ridgeplan.validate.quality.measure import Inputs, answer_scores, mean_scores, parts, times, warm
from ridgeplan.validate.quality.question import Question, named_plan
from ridgeplan.validate.quality.ruler import Prompt, PromptMaker, chosen_tasks
from ridgeplan.validate.quality.ruler_samples import Task


def task(name, new_tokens):
    return Task(name, lambda *_: pytest.fail("its prompts are given"), new_tokens)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def engines(tiny_folder):
    plans = Question(str(tiny_folder), load_shape(str(tiny_folder)), tuple(map(named_plan, ("dapq", "snapkv"))),
                     (512,), "text", "a text").families_at(512)  # fmt: skip
    made = (replace(plan, workload=replace(plan.workload, batch=2)) for family in plans for plan in family)
    first, *others = made
    engine = load(first, str(tiny_folder), device="cpu")
    return [engine, *(load(plan, str(tiny_folder), device="cpu", weights=engine.weights) for plan in others)]


def test_an_answer_ends_where_its_own_task_ends(engines, tokenizer):
    ids = list(range(40, 80))
    answer = engines[0].generate(ids, 12).tokens[0]
    text = [tokenizer.decode(answer[:count], skip_special_tokens=True) for count in (4, 12)]
    assert text[1].startswith(text[0])
    last = text[1][len(text[0]) :]
    assert last
    assert last not in text[0]
    prompt = Prompt(ids, (last, text[0]))
    asked = [(task("short", 4), prompt), (task("long", 12), prompt)]
    assert answer_scores(engines[:1], asked, tokenizer) == [[0.5, 1.0]]


def test_scores_are_the_mean_of_each_task():
    one, other, prompt = task("one", 1), task("other", 1), Prompt([1], ("a",))
    asked = [(one, prompt), (one, prompt), (other, prompt)]
    assert mean_scores(asked, [1.0, 0.5, 0.25]) == {"one": 0.75, "other": 0.25}


def test_parts_hold_all_in_order():
    assert list(parts([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("batch", "rows", "names"),
    [
        (1, 1, ["vt", "cwe", "fwe"]),
        (3, 3, ["vt", "cwe", "fwe"]),
        (4, 4, ["vt cwe", "fwe"]),
        (100, 6, ["vt cwe fwe"]),  # three tasks with two prompts each
    ],
)
def test_tasks_run_together_as_far_as_a_batch_holds_them(batch, rows, names, tiny_folder):
    question = Question(str(tiny_folder), load_shape(str(tiny_folder)), (), (1024,), "text", "a text", samples=2,
                        passages=3, tasks=chosen_tasks(["vt", "cwe", "fwe"]), batch=batch)  # fmt: skip
    groups = Inputs(question, 1024, None, lambda: pytest.fail("nothing is measured")).groups
    assert [(one.name, one.rows) for one in groups] == [("text", rows), ("times", 1), *((one, rows) for one in names)]


@pytest.fixture
def filled(monkeypatch):
    """The numbers of engines that prompts were processed for."""
    counts, fill = [], measure.Engine._fill
    monkeypatch.setattr(measure.Engine, "_fill", lambda *given: counts.append(len(given[2])) or fill(*given))
    return counts


def test_prompts_run_once_for_all_engines(engines, tokenizer, filled):
    asked = [(task("short", 4), Prompt(list(range(40, 80)), ("x",)))]
    assert len(answer_scores(engines, asked, tokenizer)) == 3
    assert filled == [3]


def test_engines_are_warmed_by_one_prompt_and_timed_by_their_own(engines, filled):
    prompt = list(range(40, 80))
    warm(engines, prompt)
    assert filled == [3]
    found = [times(engine, prompt) for engine in engines]
    assert filled == [3, 1, 1, 1]
    assert all(one[TTFT] > 0 and one[TPOT] > 0 for one in found)
    assert [one[KV_BYTES] for one in found] == [engine.cache.bytes for engine in engines]


def test_only_the_tasks_that_are_wanted_are_asked(tiny_folder, monkeypatch):
    question = Question(str(tiny_folder), load_shape(str(tiny_folder)), (), (1024,), "text", "a text", samples=2,
                        tasks=chosen_tasks(["vt", "cwe", "fwe"]), batch=4)  # fmt: skip
    inputs = Inputs(question, 1024, PromptMaker(None, None), lambda: pytest.fail("nothing is measured"))
    monkeypatch.setattr(Inputs, "prompts", lambda _, task: [Prompt([1], ("a",))] * 2)
    monkeypatch.setattr(measure, "answer_scores", lambda engines, asked, _: [[0.5] * len(asked) for _ in engines])
    *_, both, last = inputs.groups
    assert both.run(["engine", "another"], {"cwe", "fwe"}) == [{"cwe": 0.5}] * 2
    assert last.run(["engine"], {"cwe", "fwe"}) == [{"fwe": 0.5}]
