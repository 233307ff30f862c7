"""What is measured together: tasks in one batch, and answers that others of their batch let grow."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from ridgeplan.planner.quality import COST_MEASURES, FIDELITY, HEAD, KV_BYTES, PERPLEXITY, TPOT, TTFT
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.runtime import load
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of, save_head
from ridgeplan.validate.prompts import PromptError
from ridgeplan.validate.quality import measure
from ridgeplan.validate.quality import measure as module
from ridgeplan.validate.quality.measure import (
    Inputs,
    answer_scores,
    is_requested,
    mean_scores,
    measure_quality,
    parts,
    times,
    warm,
)
from ridgeplan.validate.quality.options import QualityOptions, named_plan, with_budgets
from ridgeplan.validate.quality.ruler import Prompt, PromptMaker, chosen_tasks, material
from ridgeplan.validate.quality.ruler_samples import Task


def task(name, new_tokens):
    return Task(name, lambda *_: pytest.fail("its prompts are given"), new_tokens)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def engines(tiny_folder):
    plans = QualityOptions(str(tiny_folder), load_shape(str(tiny_folder)), tuple(map(named_plan, ("dapq", "snapkv"))),
                     (512,), "text", "a text").families_at(512)  # fmt: skip
    plans_of_batch = (replace(plan, workload=replace(plan.workload, batch=2)) for family in plans for plan in family)
    first, *others = plans_of_batch
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
    question = [(task("short", 4), prompt), (task("long", 12), prompt)]
    assert answer_scores(engines[:1], question, tokenizer) == [[0.5, 1.0]]


def test_scores_are_the_mean_of_each_task():
    first, other, prompt = task("one", 1), task("other", 1), Prompt([1], ("a",))
    question = [(first, prompt), (first, prompt), (other, prompt)]
    assert mean_scores(question, [1.0, 0.5, 0.25]) == {"one": 0.75, "other": 0.25}


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
    question = QualityOptions(str(tiny_folder), load_shape(str(tiny_folder)), (), (1024,), "text", "a text", samples=2,
                        passages=3, tasks=chosen_tasks(["vt", "cwe", "fwe"]), batch=batch)  # fmt: skip
    groups = Inputs(question, 1024, None, lambda: pytest.fail("nothing is measured")).groups
    assert [(group.name, group.rows) for group in groups] == [
        ("text", rows),
        ("times", 1),
        *((name, rows) for name in names),
    ]


@pytest.fixture
def filled(monkeypatch):
    """The numbers of engines that prompts were processed for."""
    counts, fill = [], measure.Engine._prefill
    monkeypatch.setattr(
        measure.Engine, "_prefill", lambda *arguments: counts.append(len(arguments[2])) or fill(*arguments)
    )
    return counts


def test_prompts_run_once_for_all_engines(engines, tokenizer, filled):
    question = [(task("short", 4), Prompt(list(range(40, 80)), ("x",)))]
    assert len(answer_scores(engines, question, tokenizer)) == 3
    assert filled == [3]


def test_answers_are_reported_token_by_token(engines, tokenizer):
    answered = []
    question = [(task("short", 4), Prompt(list(range(40, 80)), ("x",)))]
    answer_scores(engines, question, tokenizer, lambda *plan_and_tokens: answered.append(plan_and_tokens))
    assert {plan for plan, _ in answered} == {0, 1, 2}
    assert answered == sorted(answered)


def test_engines_are_warmed_by_one_prompt_and_timed_by_their_own(engines, filled):
    prompt = list(range(40, 80))
    warm(engines, prompt)
    assert filled == [3]
    measured = [times(engine, prompt) for engine in engines]
    assert filled == [3, 1, 1, 1]
    assert all(times_of_engine[TTFT] > 0 and times_of_engine[TPOT] > 0 for times_of_engine in measured)
    assert [times_of_engine[KV_BYTES] for times_of_engine in measured] == [engine.cache.bytes for engine in engines]


def test_only_the_tasks_that_are_wanted_are_asked(tiny_folder, monkeypatch):
    question = QualityOptions(str(tiny_folder), load_shape(str(tiny_folder)), (), (1024,), "text", "a text", samples=2,
                        tasks=chosen_tasks(["vt", "cwe", "fwe"]), batch=4)  # fmt: skip
    inputs = Inputs(question, 1024, PromptMaker(None, None), lambda: pytest.fail("nothing is measured"))
    monkeypatch.setattr(Inputs, "prompts", lambda _, task: [Prompt([1], ("a",))] * 2)
    monkeypatch.setattr(measure, "answer_scores", lambda engines, calls, *_: [[0.5] * len(calls) for _ in engines])
    *_, both, last = inputs.groups
    steps = []
    assert both.run(["engine", "another"], {"cwe", "fwe"}, lambda *step: steps.append(step)) == [{"cwe": 0.5}] * 2
    assert steps == [("prompts of cwe", 0), ("cwe, prompt 1 of 2, 1 tokens", 0)]
    assert last.run(["engine"], {"cwe", "fwe"}, lambda *_: None) == [{"fwe": 0.5}]


# A run: what its rows hold, that known figures are not measured again, and that weights are shared.

TEXT = "The quick brown fox jumps over the lazy dog. " * 80
TASK = "niah_single_1"


def question(folder, plans=("int8",), contexts=(1200,), **options):
    sizes = {"passages": 2, "tokens": 16, "samples": 1, "tasks": chosen_tasks([TASK]), "device": "cpu", **options}
    return QualityOptions(
        str(folder), load_shape(str(folder)), tuple(map(named_plan, plans)), contexts, TEXT, "foxes", **sizes
    )


def rows(question, known=()):
    return [row for group in measure_quality(question, material(TEXT), known) for row in group]


@pytest.fixture(scope="module")
def measured(tiny_folder):
    return rows(question(tiny_folder))


def test_every_plan_has_every_measure_beside_plain_decodings(measured, tiny_folder):
    by_plan = {plan: {row.measure: row for row in measured if row.plan == plan} for plan in ("autoregressive", "int8")}
    names = [FIDELITY, PERPLEXITY, *COST_MEASURES, TASK]
    assert [list(measures) for measures in by_plan.values()] == [names, names]
    plain, int8 = by_plan.values()
    assert all(row.value == row.plain for row in plain.values())
    assert plain[FIDELITY].value == pytest.approx(1, abs=1e-6)
    assert 0.5 < int8[FIDELITY].value < 0.9999
    assert int8[PERPLEXITY].plain == plain[PERPLEXITY].value != int8[PERPLEXITY].value
    # Codes take one byte per element where float32 takes four, beside 256 recent tokens of 1200.
    assert int8[KV_BYTES].value < 0.6 * int8[KV_BYTES].plain
    row = int8[TASK]
    assert (row.model, row.context, row.samples, row.tokens, row.text) == (tiny_folder.name, 1200, 1, 16, "foxes")
    assert (row.dtype, dict(row.target)) == ("float32", {"kv.target_bits": 8, "kv.group": 128})
    assert dict(plain[TASK].target) == {}


def test_what_is_known_is_not_measured_again(measured, tiny_folder, monkeypatch):
    opened = []
    load = module.load
    monkeypatch.setattr(
        module, "load", lambda plan, *arguments, **named: opened.append(plan) or load(plan, *arguments, **named)
    )
    assert rows(question(tiny_folder), measured) == []
    assert opened == []
    kept = [row for row in measured if (row.plan, row.measure) != ("int8", TASK)]
    (again,) = rows(question(tiny_folder), kept)
    assert again == next(row for row in measured if (row.plan, row.measure) == ("int8", TASK))
    assert [plan.kv.target_bits for plan in opened] == [8]
    other = rows(question(tiny_folder, seed=1), measured)
    assert len(other) == len(measured)


def test_a_fidelity_that_is_missing_is_compared_with_plain_decoding_again(measured, tiny_folder):
    kept = [row for row in measured if row.plan != "int8" or row.measure not in (FIDELITY, PERPLEXITY)]
    values = {row.measure: row.value for row in rows(question(tiny_folder), kept)}
    expected = {row.measure: row.value for row in measured if row.plan == "int8"}
    assert values == {name: pytest.approx(expected[name]) for name in (FIDELITY, PERPLEXITY)}


def test_weights_are_shared_and_progress_counts_the_cells(tiny_folder, monkeypatch):
    shared, seen = [], []
    load = module.load

    def counted(plan, *arguments, weights=None, **named):
        shared.append(weights is not None)
        return load(plan, *arguments, weights=weights, **named)

    monkeypatch.setattr(module, "load", counted)
    options = question(tiny_folder, contexts=(1200, 1300), tasks=())
    list(measure_quality(options, material(TEXT), (), lambda *what: seen.append(what)))
    assert shared.count(False) == 1
    done = [inputs for _, inputs, _ in seen]
    per_context = 2 * (options.passages + 1)  # of two plans: passages, and the prompt that is timed
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 2 * per_context - 1)
    assert {total for *_, total in seen} == {2 * per_context}
    assert seen[0][0] == "1200 tokens, autoregressive: text"
    assert f"1200 tokens, int8: text, passage {options.passages} of {options.passages}" in [what for what, *_ in seen]


def test_rows_of_the_question_are_told_from_others(measured, tiny_folder):
    assert all(is_requested(question(tiny_folder), row) for row in measured)
    assert not any(is_requested(question(tiny_folder, contexts=(1300,)), row) for row in measured)
    assert not any(is_requested(question(tiny_folder, seed=1), row) for row in measured)
    fewer = [row for row in measured if not is_requested(question(tiny_folder, passages=3), row)]
    assert {row.measure for row in fewer} == {FIDELITY, PERPLEXITY}
    only_plain = [row for row in measured if is_requested(question(tiny_folder, plans=()), row)]
    assert {row.plan for row in only_plain} == {"autoregressive"}


def test_rows_name_the_head_of_plans_that_choose_by_one(tiny_folder, tmp_path):
    """Another head is measured anew, plain decoding is not."""
    shape, files = load_shape(str(tiny_folder)), [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    config = HeadConfig("tiny", shape.hidden, shape.vocab, shape.q_heads, shape.kv_heads, shape.head_dim, 2048)
    probe = probe_of(load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"])
    for seed, path in enumerate(files):
        torch.manual_seed(seed)
        keys, queries = (torch.randn(heads * shape.head_dim, shape.hidden) for heads in (shape.kv_heads, shape.q_heads))
        save_head(path, Head(config, HeadWeights(torch.ones(shape.hidden), queries, keys, probe)))
    first, two = (question(tiny_folder, ("specontext-resident",), tasks=(), retrieval_head=str(path)) for path in files)
    measured = rows(first)
    heads = {row.target.get(HEAD) for row in measured}
    assert {name and name.split()[0] for name in heads} == {None, "one"}
    again = rows(two, measured)
    assert {row.plan for row in again} == {row.plan for row in measured} - {"autoregressive"}
    assert all(row.target[HEAD].startswith("two ") for row in again)
    assert all(is_requested(two, row) for row in again) and not any(is_requested(first, row) for row in again)


def test_a_text_that_is_too_short_is_refused(tiny_folder):
    with pytest.raises(PromptError, match="needed: 3"):
        rows(question(tiny_folder, contexts=(4000,)))


def test_tasks_that_plain_decoding_does_not_solve_may_be_left_out(tiny_folder, measured):
    assert next(row.value for row in measured if row.measure == TASK) < 0.5  # a random model finds no needle
    values = rows(question(tiny_folder, only_solved=True))
    assert [row.plan for row in values if row.measure == TASK] == ["autoregressive"]
    assert len(values) == len(measured) - 1


def test_an_oracle_is_told_the_passages_and_is_measured_on_nothing_else(tiny_folder):
    options = replace(question(tiny_folder), plans=tuple(with_budgets(["oracle", "random"], [64, 5000])))
    values = {(row.plan, row.measure): row.value for row in rows(options)}
    assert {measure for plan, measure in values if plan.startswith("oracle")} == {FIDELITY, PERPLEXITY}
    (full,) = {plan for plan, _ in values if plan.startswith("oracle")} - {"oracle 64"}
    assert values[full, FIDELITY] == pytest.approx(1, abs=1e-6)
    assert values["random 64", FIDELITY] != values["oracle 64", FIDELITY] < 0.99
    assert ("random 64", KV_BYTES) in values


@pytest.mark.parametrize("policy", ["dapq", "snapkv"])
def test_evictions_are_measured_on_the_cache_that_they_leave(tiny_folder, policy):
    plans = tuple(with_budgets([policy], [64, 5000]))
    options = replace(question(tiny_folder, tasks=()), plans=plans)
    values = {(row.plan, row.measure): row for row in rows(options)}
    everything, little = f"{policy} 1168", f"{policy} 64"  # of prompts of 1168 tokens
    assert values[everything, FIDELITY].value == pytest.approx(1, abs=1e-6)
    assert 0.05 < values[little, FIDELITY].value < 0.99
    assert values[little, PERPLEXITY].value != values[little, PERPLEXITY].plain
    assert values[little, KV_BYTES].value < 0.2 * values[little, KV_BYTES].plain
    assert dict(values[little, FIDELITY].target) == {"eviction.policy": policy, "eviction.budget": 64}


def test_a_batch_changes_no_figure(tiny_folder):
    """Prompts alone and together, of policies that keep different parts of them."""
    tasks = chosen_tasks([TASK, "vt"])
    options = replace(question(tiny_folder, tasks=tasks), plans=tuple(with_budgets(["dapq", "h2o"], [64])))
    values, together = (
        {(row.plan, row.measure): row.value for row in rows(replace(options, batch=batch))} for batch in (1, 2)
    )
    assert values.keys() == together.keys()
    timed = ("ttft_ms", "tpot_ms")
    assert {key: value for key, value in together.items() if key[1] not in timed} == pytest.approx(
        {key: value for key, value in values.items() if key[1] not in timed}, rel=1e-5
    )
