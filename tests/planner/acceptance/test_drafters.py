"""Acceptance of drafters by kind of text, and the plans with a drafter that a search considers."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.acceptance import drafters
from ridgeplan.planner.acceptance.drafter_rows import DrafterRow, drafter_rows, load_drafter_rows
from ridgeplan.planner.acceptance.drafters import _pooled, proposal_acceptance, text_covariances, texts_of
from ridgeplan.planner.acceptance.rows import rows_json
from ridgeplan.planner.acceptance.speculation_profile import NAME, head_rows, head_settings, profile_document
from ridgeplan.planner.lowering import round_costs, strategy_of
from ridgeplan.planner.prediction import predict, predict_question
from ridgeplan.planner.queries.drafter_range import drafter_range
from ridgeplan.planner.question import ask as question_of
from ridgeplan.planner.resolution import resolve
from ridgeplan.planner.search import best_of_preset, families
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.drafters import capped_cascade_tokens, pass_tokens
from ridgeplan.roofline.execution import MAX_GAMMA, RoundShape, round_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import head_memory
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Plan, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.presets import describe, preset_name, short_name
from ridgeplan.roofline.plan.support import only_estimated
from ridgeplan.roofline.round import conditional_acceptance, expected_tokens

LLAMA = load_shape("Llama-3.1-8B")
DOCS = Workload("meta-llama/Llama-3.1-8B", "h200", 32768, text="docs")
SUFFIX, HEAD, BLOCK = DrafterKind.SUFFIX, DrafterKind.HEAD, DrafterKind.BLOCK


def test_rows_speak_for_their_kind_of_text_alone():
    texts = {row.text for row in drafter_rows() if row.kind is SUFFIX}
    assert texts == {"code", "docs", "prose"}
    known = {text: proposal_acceptance(SUFFIX, replace(DOCS, text=text)) for text in texts}
    tokens = {text: tokens_of_pass(each, 4) for text, each in known.items()}
    assert tokens["prose"] < 1.15 < 1.3 < tokens["code"] < 1.5 < tokens["docs"]
    for each in known.values():
        assert each.known and each.source == "transferred"  # from rows of other models
        low, best, high = each.at(4)
        assert 0 <= low < best < high <= 1
    for text in ("chat", ""):
        unknown = proposal_acceptance(SUFFIX, replace(DOCS, text=text))
        assert not unknown.known and unknown.source == "prior" and unknown.at(4)[0] == 0


def tokens_of_pass(known, depth):
    """Tokens of a pass whose proposals the target verifies."""
    return float(expected_tokens(RoundShape(depth, 0, depth), known.at(depth)[1], known.hit, 0))


def measured_rows():
    """The shipped rows that were counted in rounds of a model."""
    return [row for row in drafter_rows() if row.kind is SUFFIX and row.rounds]


@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: f"{row.model}-{row.text}-{row.context}")
def test_passes_have_the_tokens_that_were_measured_at_any_number_of_proposals(row):
    known = proposal_acceptance(SUFFIX, Workload(row.model, "h200", row.context, 1, text=row.text))
    assert known.source == "measured"
    for depth in (1, 3, 8):
        measured = 1 + row.hit * np.cumprod(row.acceptance_at)[:depth].sum()
        assert tokens_of_pass(known, depth) == pytest.approx(measured, rel=0.015)


def test_a_cascade_has_the_tokens_of_rounds_whose_acceptance_grows_by_position():
    """Simulated rounds of two passes, with the rates by position of Qwen2.5-Coder-0.5B on code at 4096 tokens."""
    rates, hit, accepted, rounds = np.array([0.47, 0.72, 0.78, 0.81]), 0.43, 0.93, 400_000
    row = DrafterRow(SUFFIX, "s", "m", 4, "measured", "w", 4096, hit, rounds=100_000, acceptance_at=tuple(rates))
    known = _pooled([row], Workload("m", "h200", 4096))
    generator = np.random.default_rng(0)
    matched = (generator.random((2, rounds, 4)) < rates).cumprod(2).sum(2) * (generator.random((2, rounds)) < hit)
    drafts = (1 + matched).sum(0)
    kept = np.minimum(generator.geometric(1 - accepted, rounds) - 1, drafts)
    predicted = capped_cascade_tokens(accepted, known.hit, known.at(4)[1], 4, 2, 10)
    assert float(predicted) == pytest.approx(1 + kept.mean(), rel=0.008)


def test_few_comparisons_have_a_wide_band(tmp_path):
    """Half of 14 proposals: between 0.30 and 0.70 with 90% (Wilson)."""
    path, workload = tmp_path / "rows.json", Workload("m", "h200", 4096, text="code")
    row = DrafterRow(SUFFIX, "s", "m", 1, "measured", "w", 4096, 0.5, 0.5, rounds=28, text="code")
    path.write_text(rows_json((), [], [row]))
    low, best, high = proposal_acceptance(SUFFIX, replace(workload, drafter_rows=str(path))).at(1)
    assert (low, best, high) == pytest.approx((0.30, 0.5, 0.70), abs=0.01)


def test_rows_of_other_models_are_pooled_by_their_passes(tmp_path):
    """300 passes of one model with 0.8, 100 of another with 0.4, halfway in logarithms between contexts of a third."""
    path = tmp_path / "rows.json"
    row = DrafterRow(SUFFIX, "s", "a", 1, "measured", "w", 8192, 1.0, 0.8, rounds=300, text="code")
    third = replace(row, model="c", context=4096, acceptance=0.1, rounds=100)
    rows = (
        row,
        replace(row, model="b", acceptance=0.4, rounds=100),
        third,
        replace(third, context=16384, acceptance=0.3),
    )
    path.write_text(rows_json((), [], rows))
    known = proposal_acceptance(SUFFIX, Workload("d", "h200", 8192, 1, text="code", drafter_rows=str(path)))
    low, best, high = known.at(1)
    assert best == pytest.approx((300 * 0.8 + 100 * 0.4 + 100 * 0.2) / 500, rel=0.01)
    assert (low, high) == pytest.approx((0.2, 0.8), rel=0.02) and "4 rows of 3 models" in known.where


def test_plans_on_longer_texts_are_not_faster(h200_profile):
    plans = [planner.recommend("Llama-3.1-8B", "h200", context, text="docs", profile=h200_profile)
             for context in (4096, 16384, 32768, 65536)]  # fmt: skip
    times = [plan.predicted.best.tpot_ms for plan in plans]
    assert times == sorted(times)


def test_rows_that_a_user_measured_come_before_shipped_ones(h200_profile, tmp_path):
    path = tmp_path / "rows.json"
    row = DrafterRow(SUFFIX, "suffix lookup", "m", 4, "measured", "my code", 8192, 0.9, 0.8, text="code")
    path.write_text(rows_json((), ["ridgeplan acceptance"], [row]))
    ask = {"gpu": "h200", "profile": h200_profile, "text": "code"}
    plan = planner.recommend("Llama-3.1-8B", ctx=4096, acceptance=path, **ask).plan
    known = proposal_acceptance(SUFFIX, plan.workload)
    assert (known.hit, known.best, known.depth, known.source) == (0.9, pytest.approx(0.8), 4, "transferred")
    assert "my code" in known.where and plan.workload.drafter_rows == str(path) and plan.speculation.gamma <= 4
    assert Plan.from_json(plan.to_json()) == plan
    of_model = replace(plan.workload, model="owner/m")
    assert proposal_acceptance(SUFFIX, of_model).source == "measured"
    far = replace(plan.workload, context=122880)  # for which a shipped row is nearer
    assert "my code" not in proposal_acceptance(SUFFIX, far).where
    for other in ({"text": "docs"}, {}):  # of which the file says nothing
        answer = planner.recommend("Llama-3.1-8B", ctx=4096, acceptance=path, **{**ask, "text": None, **other})
        assert not answer.plan.workload.drafter_rows
    path.write_text(rows_json((), [], [replace(row, hit=0.1, acceptance=0.1)]))
    assert not planner.recommend("Llama-3.1-8B", ctx=4096, acceptance=path, **ask).plan.speculation.drafter.active
    path.unlink()
    assert proposal_acceptance(SUFFIX, plan.workload) == proposal_acceptance(
        SUFFIX, replace(DOCS, context=4096, text="code")
    )
    for content, words in (("[1]", r"drafters is \[1\]"), ('{"drafters": [{}]}', "drafter row: ")):
        path.write_text(content)
        with pytest.raises(PlanError, match=words):
            load_drafter_rows(path)


def test_a_users_figure_is_of_one_drafter():
    given = replace(DOCS, text="", acceptance_length=2.1, drafter=HEAD)
    known = proposal_acceptance(HEAD, given)
    assert known.best == pytest.approx(conditional_acceptance(1.1 / 4, 4))
    assert expected_tokens(RoundShape(4, 0, 4), known.best, known.hit, 0) == pytest.approx(2.1)
    assert not proposal_acceptance(SUFFIX, given).known
    for length in (0.5, 9):
        with pytest.raises(PlanError, match=f"acceptance_length is {length}; allowed: 1 to 5 tokens, of a pass with 4"):
            planner.recommend("Llama-3.1-8B", "h200", 4096, acceptance_length=length)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"gamma": 3, "drafter": Drafter(SUFFIX, 4)}, "gamma is 3 with a drafter of depth 4; allowed: the same"),
        ({"gamma": 9, "drafter": Drafter(SUFFIX, 3, 2)}, "gamma is 9 with 2 passes; allowed: 2 to 8"),
    ],
)
def test_drafters_and_rounds_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        Speculation(**changes)
    with pytest.raises(PlanError, match="drafter's depth is 0; allowed: 1 to 15"):
        Drafter(SUFFIX)


def test_a_search_has_drafters_of_known_acceptance_alone():
    def kinds(workload):
        return {family.template.speculation.drafter.kind for family in families(workload, offload=False)}

    assert kinds(replace(DOCS, text="")) == {DrafterKind.NONE}
    assert kinds(DOCS) == kinds(replace(DOCS, text="code")) == {DrafterKind.NONE, SUFFIX, HEAD, BLOCK}
    assert kinds(replace(DOCS, text="chat")) == {DrafterKind.NONE, HEAD, BLOCK}
    assert kinds(replace(DOCS, text="prose")) == {DrafterKind.NONE, SUFFIX, BLOCK}
    for family in families(DOCS, offload=False):
        if family.template.speculation.drafter.active:
            for gamma in family.gammas:
                plan = family.plan(gamma, 1.0)  # raises PlanError for a contradiction
                assert round_shape(plan.speculation.round_kind) == family.round(gamma)
                assert Plan.from_json(plan.to_json()) == plan


def test_answers_for_documentation_draft_by_suffix_and_those_for_unknown_texts_do_not(h200_profile):
    ask = {"gpu": "h200", "ctx": 4096, "profile": h200_profile}
    docs, prose, unknown = (planner.recommend("Llama-3.1-8B", text=text, **ask) for text in ("docs", "prose", None))
    assert docs.plan.speculation.drafter.kind is SUFFIX
    assert short_name(describe(docs.plan)).endswith("+suffix")
    assert docs.predicted.best.tpot_ms < prose.predicted.best.tpot_ms
    assert docs.predicted.to_dict()["drafter"]["hit"] == proposal_acceptance(SUFFIX, docs.plan.workload).hit
    assert unknown.plan.speculation.drafter.kind is DrafterKind.NONE
    chosen = predict(docs.plan, LLAMA, h200_profile)
    assert chosen.best.tpot_ms == pytest.approx(docs.predicted.best.tpot_ms)
    assert chosen.tokens_per_round > 1.3


HEAD_OF_2_8 = {"drafter": "head", "acceptance_length": 2.8, "new_tokens": 64}


@pytest.mark.parametrize(
    "context, asked, kind",
    [
        (4096, {"text": "docs"}, HEAD),
        (16384, {"text": "docs"}, SUFFIX),
        (4096, {"text": "chat"}, HEAD),
        (4096, {"text": "prose"}, DrafterKind.NONE),
        (32768, {"text": "chat"}, DrafterKind.NONE),
        (122880, {"text": "prose"}, DrafterKind.NONE),
        (4096, HEAD_OF_2_8, HEAD),
        (4096, HEAD_OF_2_8 | {"new_tokens": 120000}, DrafterKind.NONE),  # most of them where it loses
        (4096, HEAD_OF_2_8 | {"acceptance_length": 1.1}, DrafterKind.NONE),
    ],
)
def test_vllm_drafts_where_that_pays(context, asked, kind):
    chosen = planner.recommend("Llama-3.1-8B", "h200", context, backend="vllm", **asked)
    assert chosen.plan.speculation.drafter.kind is kind and chosen.adaptive is None
    assert (chosen.drafter_range is None) == (kind is DrafterKind.NONE)
    if (
        kind is HEAD and asked is HEAD_OF_2_8
    ):  # passes with 4 drafts take 1.2 to 1.7 plain steps (the table: 3.70, 5.15 and 6.12 ms)
        assert chosen.predicted.best.tpot_ms == pytest.approx(5.63 / 2.8, rel=0.03)
        assert chosen.predicted.memory_bytes["draft_weights"] > 5e8
    if kind is SUFFIX:
        low, high = chosen.predicted.low.tpot_ms, chosen.predicted.high.tpot_ms
        assert low < 0.8 * chosen.predicted.best.tpot_ms < 1.2 * chosen.predicted.best.tpot_ms < high


def test_engines_run_no_drafter_whose_passes_were_not_measured():
    for question in ({"gpu": "h100"}, {"gpu": "h200", "backend": "sglang"}, {"gpu": "h200", "model": "Qwen2.5-0.5B"}):
        whole_question = {"model": "Llama-3.1-8B", "backend": "vllm", "ctx": 4096, **HEAD_OF_2_8, **question}
        assert not planner.recommend(**whole_question).plan.speculation.active


def test_a_drafter_loses_from_some_context_on(h200_profile, tmp_path):
    """A cascade whose suffixes are accepted at 4k, and hardly at 64k."""
    row = DrafterRow(SUFFIX, "suffix lookup", "m", 4, "measured", "w", 4096, 0.7, 0.8, text="code")
    rows = row, replace(row, context=65536, hit=0.1, acceptance=0.05)
    (tmp_path / "rows.json").write_text(rows_json((), [], rows))
    ask = {"profile": h200_profile, "text": "code", "acceptance": tmp_path / "rows.json"}
    plan = planner.estimate("Llama-3.1-8B", "h200", 4096, preset="cascade", **ask).plan
    machine = Machine.of(h200_profile)
    pays = drafter_range(plan, LLAMA, h200_profile, machine)
    assert pays.last == LLAMA.max_context and not pays.assumed and 4096 < pays.loses_from < 65536
    for context, faster in ((4096, True), (pays.loses_from, True), (pays.loses_from + 1024, False)):
        here = replace(plan, workload=replace(plan.workload, context=context, new_tokens=1))
        self_drafts = [replace(here.speculation, gamma=gamma, drafter=Drafter()) for gamma in range(1, 9)]
        drafted, *without = (
            predict(replace(here, speculation=each), LLAMA, h200_profile).best.tpot_ms
            for each in (here.speculation, *self_drafts)
        )
        assert (drafted < min(without)) == faster
    without_drafter = replace(plan.speculation, gamma=4, drafter=Drafter())
    assert drafter_range(replace(plan, speculation=without_drafter), LLAMA, h200_profile, machine) is None
    for length, words in ((4.5, "pays up to 128k tokens of context"), (1.0, "loses at all contexts")):
        given = replace(plan, workload=replace(plan.workload, acceptance_length=length))
        words += " against self-drafts alone, at the same acceptance"
        assert str(drafter_range(given, LLAMA, h200_profile, machine)) == words


def test_gains_of_a_head_decay_with_the_context_as_published(h200_profile):
    """Gains of 1.295 tokens a pass at 2048, of 0.687 at 8192, and of 0.084 at 20480."""
    chat = Workload("Llama-3.1-8B-Instruct", "h200", 1024, 1, text="chat")
    short, half, far = (proposal_acceptance(HEAD, replace(chat, context=each)) for each in (1024, 8192, 20480))
    tokens = [tokens_of_pass(each, 3) for each in (short, half, far)]
    assert tokens == pytest.approx([1 + 1.605 * gain / 1.295 for gain in (1.295, 0.687, 0.084)], rel=2e-3)
    assert "request 684" in far.where and "request 684" not in short.where
    long = proposal_acceptance(HEAD, replace(chat, new_tokens=19456))  # to where it has decayed
    assert tokens[2] < tokens_of_pass(long, 3) < (tokens[0] + tokens[2]) / 2
    plan = Plan(
        replace(DOCS, context=4096, text="", acceptance_length=2.8, drafter=HEAD),
        speculation=Speculation(4, drafter=Drafter(HEAD, 4)),
    )
    windowed = replace(plan, speculation=Speculation(4, drafter=Drafter(HEAD, 4, window=512)))
    decaying, constant = (str(drafter_range(each, LLAMA, h200_profile, Machine.of(h200_profile)))
                          for each in (plan, windowed))  # fmt: skip
    assert decaying.startswith("loses from about") and decaying.endswith("if it decays as EAGLE-3 was published to")
    assert constant == "pays up to 128k tokens of context against plain decoding, at the same acceptance"


def test_an_adaptive_plan_has_the_costs_of_all_tiers(h200_profile):
    plan = planner.estimate("Llama-3.1-8B", "h200", 4096, preset="cascade", profile=h200_profile, text="docs").plan
    adaptive = replace(plan, speculation=replace(plan.speculation, adaptive=True))
    costs = round_costs(adaptive, LLAMA, h200_profile)
    shapes = [round_shape(kind) for kind in costs.gammas]
    assert costs.gammas[0] == 0 and costs.drafter_known and 0 < costs.hit < 1
    assert {(shape.passes > 0, shape.depth > 0) for shape in shapes[1:]} == {(True, False), (False, True), (True, True)}
    cascade, drafts = (
        next(costs.seconds[kind] for kind in costs.gammas if round_shape(kind)[1:] == tiers)
        for tiers in ((1, plan.speculation.drafter.depth), (1, 0))
    )
    assert drafts < cascade < 2 * drafts


def test_every_tier_is_reached_by_a_preset_that_adapts(h200_profile):
    ask = {"profile": h200_profile, "preset": "adaptive-cascade"}
    for text in ({}, {"text": "prose"}):
        plan = planner.estimate("Llama-3.1-8B", "h200", 4096, **ask, **text).plan
        shapes = [round_shape(kind) for kind in plan.speculation.round_kinds]
        assert {(shape.passes > 0, shape.depth > 0) for shape in shapes} == {
            (False, False), (True, False), (False, True), (True, True)
        }  # fmt: skip
        assert max(shape.gamma for shape in shapes) == plan.speculation.gamma == 15
        assert preset_name(plan) == "adaptive-cascade"
    for text, names in (("docs", ["adaptive-cascade"]), ("", []), ("chat", [])):  # there are no rows of chats
        searched = families(Workload("Llama-3.1-8B", "h200", 4096, text=text), offload=False)
        assert [family.name for family in searched if family.template.speculation.adaptive] == names


def test_the_spread_of_texts_is_what_rows_were_drawn_with(monkeypatch):
    """Rows of 400 contexts, each the mean of four texts; a trend over contexts is no spread."""
    generator, rows = np.random.default_rng(0), []
    texts, models = np.array([[0.2, 0.1], [0.1, 0.6]]), np.array([[0.3, 0.4], [0.4, 1.0]])
    for text in ("code", "docs", "prose"):
        for model in generator.multivariate_normal([0, 0], models, 40):
            for context in np.geomspace(1024, 1 << 17, 10).astype(int):
                odds = generator.multivariate_normal(model, texts / 4) + 0.1 * math.log(context / 16384)
                hit, acceptance = 1 / (1 + np.exp(-odds))
                fields = {"context": int(context), "depth": 1, "rounds": 1 << 20, "text": text, "source": "measured"}
                rows.append(DrafterRow(SUFFIX, "suffix lookup", f"m{model[0]}", where="w", hit=hit,
                                       acceptance=acceptance, **fields))  # fmt: skip
    monkeypatch.setattr(drafters, "drafter_rows", lambda: rows)
    between_texts, between_models = text_covariances.__wrapped__()
    assert between_texts == pytest.approx(texts, abs=0.06)
    assert between_models == pytest.approx(models, abs=0.25)


def test_shipped_rows_say_how_much_texts_differ():
    """Standard deviations of log odds, as the binomial error of four texts' counts does not explain them."""
    between_texts, between_models = text_covariances()
    assert np.sqrt(np.diag(between_texts)) == pytest.approx([0.37, 0.78], abs=0.01)
    assert np.sqrt(np.diag(between_models)) == pytest.approx([0.62, 1.19], abs=0.01)
    assert 0 < between_texts[0, 1] < between_models[0, 1]  # what repeats more also repeats longer


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_texts_have_the_tokens_of_their_mean(depth):
    known = proposal_acceptance(SUFFIX, DOCS)
    hits, accepted, weights = texts_of(known, depth, 1)
    assert weights.sum() == pytest.approx(1) and weights[-1] == 0 and (weights >= 0).all()
    assert (hits[-1], accepted[-1]) == (known.hit, known.at(depth)[1])
    passes = weights @ [1 / pass_tokens(hit, rate, depth) for hit, rate in zip(hits, accepted, strict=True)]
    assert 1 / passes == pytest.approx(pass_tokens(known.hit, known.at(depth)[1], depth), rel=1e-3)


def test_texts_differ_less_in_batches_of_a_models_own_rows_and_not_at_all_without_rows():
    def spread(workload, sequences=1):
        known = proposal_acceptance(SUFFIX, workload)
        _, accepted, weights = texts_of(known, 4, sequences)
        odds = np.log(accepted / (1 - accepted))
        return math.sqrt(weights @ (odds - weights @ odds) ** 2)

    with_rows = replace(DOCS, model="Qwen2.5-Coder-0.5B-Instruct")
    assert spread(with_rows) == pytest.approx(0.784, abs=0.002)
    assert spread(with_rows, sequences=4) == pytest.approx(spread(with_rows) / 2)
    assert spread(DOCS) == pytest.approx(math.hypot(0.784, 1.195), abs=0.002)
    assert spread(replace(DOCS, text="chat")) == pytest.approx(0, abs=1e-6)


def test_a_cascades_proposals_are_fewer_than_its_drafts(h200_profile):
    """As a pass adds a token to what it accepts; on prose, where few suffixes match, too."""
    ask = {"preset": "cascade", "profile": h200_profile, "text": "prose"}
    speculation = planner.estimate("Llama-3.1-8B", "h200", 4096, **ask).plan.speculation
    assert 0 < speculation.drafter.depth < speculation.gamma
    assert 0 < speculation.drafter.passes < speculation.gamma  # else no pass would need its proposals


@pytest.mark.parametrize("text, context", [("code", 4096), ("docs", 122880), ("prose", 32768)])
def test_the_searched_cascade_is_near_the_best_of_all_gammas_passes_and_depths(text, context, h200_profile):
    """Of 1 to 5 passes over 1 to 4 proposals each; only the fewest passes of a gamma are searched."""
    question = question_of("Llama-3.1-8B", "h200", context, profile=h200_profile, text=text)
    plan = best_of_preset("cascade", question).plan
    speculation = plan.speculation
    plans = [
        replace(plan, speculation=replace(speculation, gamma=gamma, drafter=Drafter(SUFFIX, depth, passes)))
        for passes, depth in product(range(1, 6), range(1, 5))
        for gamma in range(passes, min(MAX_GAMMA, passes * (depth + 1)) + 1)
    ]
    chosen_ms, *times_ms = (each.best.tpot_ms for each in predict_question([plan, *plans], question))
    assert chosen_ms == pytest.approx(min(times_ms), rel=0.02) and speculation.drafter.depth in (1, 2, 3, 4)
    assert max(times_ms) > 1.05 * chosen_ms  # passes and depths do matter


def test_the_best_cascade_of_a_size_names_its_passes_and_depth(h200_profile):
    known = {"text": "code", "profile": h200_profile}
    (cell,) = planner.best_gamma("Llama-3.1-8B", "h200", preset="cascade", contexts=(4096,), batches=(1,), **known)
    plan = best_of_preset("cascade", question_of("Llama-3.1-8B", "h200", 4096, **known)).plan
    drafter = plan.speculation.drafter
    assert (cell.gamma, cell.passes, cell.depth) == (plan.speculation.gamma, drafter.passes, drafter.depth)


def test_the_best_number_of_proposals_is_found_by_text(h200_profile):
    ask = {"preset": "suffix", "text": "code", "profile": h200_profile}
    (cell,) = planner.best_gamma("Llama-3.1-8B", "h200", contexts=(4096,), batches=(1,), **ask)
    best = planner.estimate("Llama-3.1-8B", "h200", 4096, **ask)
    assert cell.gamma == best.plan.speculation.gamma
    assert cell.tpot_ms == pytest.approx(best.predicted.best.tpot_ms)
    with pytest.raises(PlanError, match="proposals of preset 'suffix' depend on the text; allowed: with text"):
        planner.best_gamma("Llama-3.1-8B", "h200", preset="suffix", contexts=(4096,), batches=(1,))
    with pytest.raises(PlanError, match="drafter is head without acceptance_length; allowed: with it"):
        planner.recommend("Llama-3.1-8B", "h200", 4096, drafter="head")


def test_plans_draft_with_a_head_as_its_speculation_profile_says(h200_profile, tmp_path):
    """The rates that vLLM's pull request 32030 has of a head, in Model Optimizer's format, and this package's rows."""
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab_size": 32000, "sliding_window": 512}))
    ask = {"gpu": "h200", "ctx": 4096, "profile": h200_profile, "drafter_head": str(tmp_path)}
    unmeasured = planner.recommend("Llama-3.1-8B", **ask)
    assert not unmeasured.plan.speculation.drafter.active  # nothing is known of it
    rates = [0.7296, 0.7138, 0.6807]
    other = {"method": "eagle3", "num_speculative_tokens": 3, "conditional_accept_rates": rates}
    other["measurement_conditions"] = {"dataset": "mt_bench", "isl": 4000}
    (tmp_path / NAME).write_text(json.dumps(other))
    plan = planner.recommend("Llama-3.1-8B", **ask).plan
    assert plan.speculation.drafter.kind is HEAD and plan.speculation.drafter.window == 512
    assert plan.workload.drafter_head == str(tmp_path) and only_estimated(plan) is None
    assert Plan.from_json(plan.to_json()) == plan
    known = proposal_acceptance(HEAD, plan.workload)
    assert tokens_of_pass(known, 3) == pytest.approx(2.605, abs=2e-3)
    (of_profile,) = head_rows(str(tmp_path))
    assert (of_profile.name, of_profile.context) == ("EAGLE-3 with a window of 512", 4000)
    assert str(of_profile) == f"EAGLE-3 with a window of 512 at 4000 tokens: {NAME}, 'mt_bench'"

    row = DrafterRow(HEAD, "EAGLE-3", "m", 3, "measured", "here", 30000, acceptance=0.5, text="code")
    document = profile_document([row], 100, [100, 60, 30, 0], [60, 30, 20, 0])
    (tmp_path / NAME).write_text(json.dumps(document))
    assert head_rows(str(tmp_path)) == (row,)
    assert document["marginal_accept_rates"][:3] == [0.6, 0.3, 0.2] and document["mean_accept_length"] == 2.1
    assert document["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 10, "4": 20, "5": 0}
    for text, sure in (("code", True), ("", True), ("prose", False)):
        workload = replace(plan.workload, text=text)
        assert (proposal_acceptance(HEAD, workload).best == pytest.approx(0.5)) == sure
    windowed = replace(row, name="EAGLE-3 with a window of 512", acceptance=0.7)  # the window that plans have
    (tmp_path / NAME).write_text(json.dumps(profile_document([row, windowed], 100, [100], [60])))
    assert proposal_acceptance(HEAD, replace(plan.workload, text="code")).best == pytest.approx(0.7)
    unknown = '{"method": "tree", "num_speculative_tokens": 1, "conditional_accept_rates": [0.5]}'
    for content, words in (
        ("[]", "is ..; allowed: an object"),
        ('{"measurement_conditions": 3}', "are 3; allowed"),
        (unknown, "method of .* is 'tree'; allowed: eagle3, mtp, dflash"),
        (unknown.replace("tree", "eagle3").replace("{", '{"verification_method": "block", ', 1), "is 'block'; allowed"),
    ):
        (tmp_path / NAME).write_text(content)
        with pytest.raises(PlanError, match=words):
            head_rows(str(tmp_path))
    with pytest.raises(PlanError, match=r"cannot read config\.json of the draft head 'nowhere'"):
        planner.recommend("Llama-3.1-8B", **ask | {"drafter_head": "nowhere"})


def test_a_profile_of_a_block_drafter_is_no_heads(h200_profile, tmp_path):
    """The figures that Model Optimizer's pull request 2315 has of a DFlash checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    rates = [0.816082, 0.776577, 0.749591]
    profile = {"method": "dflash", "num_speculative_tokens": 3, "conditional_accept_rates": rates}
    (tmp_path / NAME).write_text(json.dumps(profile))
    ask = {"gpu": "h200", "ctx": 4096, "profile": h200_profile, "drafter_head": str(tmp_path)}
    answer = planner.recommend("Llama-3.1-8B", **ask)
    assert answer.plan.speculation.drafter.kind is DrafterKind.NONE
    assert answer.best_estimated.plan.speculation.drafter.kind is BLOCK
    known = proposal_acceptance(BLOCK, answer.plan.workload)
    assert known.known and tokens_of_pass(known, 3) == pytest.approx(2.925, abs=1e-3)
    assert not proposal_acceptance(HEAD, answer.plan.workload).known


@pytest.mark.parametrize("text", ["code", "docs", "chat"])
def test_far_beyond_its_rows_a_block_drafter_is_extrapolated(text, h200_profile):
    """Short prompts tell nothing of 120k tokens, where 1.92 to 2.08 tokens a pass were published of another model."""
    near, far, farther = (
        proposal_acceptance(BLOCK, Workload("Qwen3.8-27B", "h200", context, text=text))
        for context in (1024, 32768, 122880)
    )
    assert near.source == "published" and far.source == farther.source == "extrapolated"
    assert tokens_of_pass(near, 7) > 3 > 2.1 > tokens_of_pass(far, 7) == pytest.approx(tokens_of_pass(farther, 7), 0.1)
    assert far.at(7)[0] == 0 and "far beyond its context, at most as published" in far.where
    best = planner.recommend("Llama-3.1-8B", "h200", 122880, text=text, profile=h200_profile).best_estimated
    assert best is None or best.predicted.beats_plain is None


def test_block_drafters_are_priced_with_their_published_acceptance(h200_profile):
    for text, length in (("code", 3.82), ("prose", 3.26), ("docs", 4.07), ("chat", 3.15)):
        known = proposal_acceptance(BLOCK, Workload("Qwen3.8-27B", "h200", 1024, text=text))
        assert known.source == "published" and tokens_of_pass(known, 7) == pytest.approx(length, abs=0.01)
    for backend in ("ridgeplan", "vllm"):
        answer = planner.recommend(
            "Llama-3.1-8B", "h200", 4096, backend=backend, drafter="block", acceptance_length=2.8
        )
        assert not answer.plan.speculation.drafter.active  # not executed, or not measured
        assert answer.best_estimated.plan.speculation.drafter.kind is BLOCK
        assert answer.best_estimated.rejected.startswith("estimated only")


def test_published_rows_say_what_their_sources_do():
    """vllm-project/speculators 684, vllm-ascend 10023 and llama.cpp 27342."""
    eagle = {row.context: row.tokens for row in drafter_rows() if row.name == "EAGLE-3" and "684" in row.where}
    assert len(eagle) == 10 and (eagle[8192], eagle[14336], eagle[16384]) == (1.687, 1.161, 1.090)
    windowed = [row for row in drafter_rows() if row.name == "EAGLE-3 with a window"]
    assert [row.tokens for row in windowed if row.model == "Qwen3-8B"][::9] == [1.584, 1.537]
    ascend = next(row for row in drafter_rows() if row.model == "Qwen3-30B-A3B" and row.text == "docs")
    assert ascend.pass_tokens == pytest.approx(1.3354) and ascend.acceptance_at[1] == pytest.approx(0.0303 / 0.3034)
    layer = next(row for row in drafter_rows() if row.name == "MTP" and not row.text)
    assert (layer.tokens, layer.depth) == (2.81, 7) and layer.proposal_acceptance == pytest.approx(0.656, abs=1e-3)


def test_the_folder_of_a_model_with_an_mtp_layer_is_a_head(h200_profile, tmp_path):
    keys = {"text_config": {"mtp_num_hidden_layers": 1, "sliding_window": 4096}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    settings = head_settings(str(tmp_path))
    assert (settings.method, settings.row_name(), settings.window) == ("mtp", "MTP", 0)
    row = DrafterRow(HEAD, settings.row_name(), "m", 3, "measured", "here", 4096, acceptance=0.8, text="code")
    document = profile_document([row], 100, [100, 60, 30, 0], [60, 30, 20, 0], settings.method)
    assert document["method"] == "mtp"
    (tmp_path / NAME).write_text(json.dumps(document))
    ask = {"gpu": "h200", "ctx": 4096, "profile": h200_profile, "drafter_head": str(tmp_path), "text": "code"}
    plan = planner.recommend("Llama-3.1-8B", **ask).plan
    assert plan.speculation.drafter.kind is HEAD and plan.speculation.drafter.window == 0


@pytest.mark.parametrize(("model", "gigabytes"), [("zai-org/GLM-4.5-Air", 4.8), ("Qwen/Qwen3.5-35B-A3B", 1.7)])
def test_a_models_own_layer_is_held_with_all_its_experts(model, gigabytes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    shape, machine = load_shape(model), Machine.of(resolve(model, "h200")[1])
    plan = Plan(Workload(model, "h200", 1, new_tokens=1, drafter_head=str(tmp_path)))
    headed = replace(plan, speculation=Speculation(1, drafter=Drafter(HEAD, 1)))
    held = head_memory(shape, strategy_of(headed, shape, machine, 0.5), 2, 2)
    assert held == pytest.approx(1e9 * gigabytes, rel=0.1)
