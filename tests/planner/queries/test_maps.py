"""Heat maps of best plans agree with the search that answers one question, and with predictions of single plans."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeplan.planner import NothingFits, PlanError, best_gamma, fit, predict, preset, recommend
from ridgeplan.planner.queries import maps as module
from ridgeplan.planner.queries.curves import SpeculationMap, speculation_map
from ridgeplan.planner.queries.maps import plan_map
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.search import search

LLAMA = "meta-llama/Llama-3.1-8B"
CONTEXTS, BATCHES = (1024, 9000, 131_072), (1, 32)
PLACES = [(row, column) for row in range(len(CONTEXTS)) for column in range(len(BATCHES))]


def at(question: Question, context: int, batch: int) -> Question:
    return replace(question, workload=replace(question.workload, context=context, batch=batch))


@pytest.mark.parametrize(
    ("gpu", "options"),
    [("h200", {}), ("rtx4090", {}), pytest.param("rtx4090", {"offload": False}, marks=pytest.mark.slow),
     pytest.param("h200", {"quality": "lossy"}, marks=pytest.mark.slow),
     ("h200", {"backend": "vllm"}), ("h200", {"quality": "exact", "kv_format": "bf16"}),
     ("a100-80gb", {"objective": "total"}), ("l40s", {"backend": "vllm", "gpus": 4})],
)  # fmt: skip
def test_every_place_has_the_plan_that_recommend_chooses(gpu: str, options: dict[str, Any]) -> None:
    """Where several are equally fast within the noise, too; and no plan where nothing fits."""
    grid = plan_map(ask(LLAMA, gpu, 1, **options), CONTEXTS, BATCHES)
    for row, column in PLACES:
        try:
            answer = recommend(LLAMA, gpu, CONTEXTS[row], batch=BATCHES[column], **options)
        except NothingFits:
            assert not grid.fits[row, column]
            continue
        assert grid.plan(row, column) == answer.plan
        assert 1e3 * grid.tpot_s[row, column] == pytest.approx(answer.predicted.best.tpot_ms, rel=1e-9)


@pytest.mark.parametrize("quality", ["near-lossless", "lossy"])
def test_figures_are_the_predictions_of_its_plans(quality: str) -> None:
    question = ask(LLAMA, "h200", 1, quality=quality)
    grid = plan_map(question, CONTEXTS, BATCHES)
    for row, column in PLACES:
        predicted = predict(grid.plan(row, column), question.shape, question.profile)
        assert 1e3 * grid.tpot_s[row, column] == pytest.approx(predicted.best.tpot_ms)
        assert 1e3 * grid.ttft_s[row, column] == pytest.approx(predicted.best.ttft_ms)
        assert grid.peak_bytes[row, column] == pytest.approx(predicted.best.peak_memory_bytes)
        assert grid.tokens_per_s[row, column] == pytest.approx(predicted.best.tokens_per_s)


def test_narrowing_first_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    question = ask(LLAMA, "h200", 1, quality="lossy")
    contexts = tuple(int(context) for context in np.geomspace(2048, 131_072, 8))
    monkeypatch.setattr(module, "DIRECT", 10**9)
    grid = plan_map(question, contexts, (1, 4, 16, 64))
    monkeypatch.setattr(module, "DIRECT", 1)
    narrowed = plan_map(question, contexts, (1, 4, 16, 64))
    assert narrowed.tpot_s == pytest.approx(grid.tpot_s, rel=0.01)
    assert len(narrowed.families) < len(grid.families)


def test_a_preset_is_mapped_alone_and_whether_it_runs_or_not() -> None:
    question = ask(LLAMA, "h200", 1)
    grid = plan_map(question, CONTEXTS, BATCHES, "specontext")
    assert set(grid.names.ravel()) == {"specontext"}
    budgets = {grid.plan(row, 0).attention.budget for row in range(len(CONTEXTS))}
    assert budgets == {1024, 2048}  # SpeContext's 2048, or all tokens of a shorter context


def test_where_nothing_fits_the_smallest_plan_stands() -> None:
    question = ask(LLAMA, "rtx4060-laptop", 1)
    grid = plan_map(question, (8192,), (1, 2))
    assert not grid.fits.any()
    assert (grid.peak_bytes > question.memory_limit_bytes).all()


def test_the_longest_context_that_fits_is_one_of_the_map() -> None:
    """Only with larger quantization groups does it fit, which are tried where the usual ones do not."""
    longest = fit(LLAMA, "rtx4090", batches=(1,), contexts=(4096,), memory_limit="14GB").contexts[0].context
    question = ask(LLAMA, "rtx4090", 1, offload=False, memory_limit="14GB")
    assert not [
        candidate
        for candidate in search(at(question, longest, 1))
        if candidate.rejection(at(question, longest, 1)) is None
    ]
    grid = plan_map(question, (longest, longest + 1), (1,))
    assert grid.fits.ravel().tolist() == [True, False]


def test_where_layers_leave_for_the_host_maps_agree_with_recommendations() -> None:
    """With 21 GB the fastest plan of 130,000 tokens leaves layers on the host, but with larger groups one fits."""
    question = ask(LLAMA, "h200", 1, memory_limit="21GB")
    contexts, batches = (96_000, 120_000, 130_000), (1, 2)
    grid = plan_map(question, contexts, batches)
    for row, column in np.ndindex(grid.fits.shape):
        answer = recommend(LLAMA, "h200", contexts[row], batch=batches[column], memory_limit="21GB")
        assert bool(grid.host_bytes[row, column]) == bool(answer.predicted.offloaded_layers)
        assert grid.tpot_s[row, column] * 1e3 <= answer.predicted.best.tpot_ms * (1 + 1e-9)
    assert not grid.host_bytes[2, 0] and grid.host_bytes[2, 1]
    usual = [
        candidate
        for candidate in search(at(question, 130_000, 1))
        if candidate.rejection(at(question, 130_000, 1)) is None
    ]
    assert min(usual, key=lambda candidate: candidate.score).host_bytes


def test_beyond_a_sliding_window_only_plain_decoding_runs() -> None:
    """Mistral-7B-v0.1 reads 4096 tokens."""
    question = ask("mistralai/Mistral-7B-v0.1", "h200", 1)
    grid = plan_map(question, (1024, 16_384), (4,))
    plans = [grid.plan(row, 0) for row in (0, 1)]
    assert [plan.speculation.active or plan.kv.format.quantized for plan in plans] == [True, False]


def test_a_grid_without_or_with_too_many_sizes_is_refused() -> None:
    question = ask(LLAMA, "h200", 1)
    with pytest.raises(PlanError, match="0 contexts x 1 batches; allowed: 1 to 65536"):
        plan_map(question, (), (1,))
    with pytest.raises(PlanError, match="context is 0; allowed"):
        plan_map(question, (8192, 0), (1,))
    with pytest.raises(PlanError, match="batch is 0; allowed"):
        plan_map(question, (8192,), (4, 0))
    with pytest.raises(PlanError, match="beyond the limit"):
        plan_map(question, (1 << 20,), (1,))


# The speed-up over gamma and acceptance agrees with predictions, and ends where algebra says.

ACCEPTANCES = np.linspace(0.0, 1.0, 101)


@pytest.fixture(scope="module")
def question() -> Question:
    return ask("meta-llama/Llama-3.1-8B", "h200", 65_536)


@pytest.fixture(scope="module")
def speedups(question: Question) -> SpeculationMap:
    return speculation_map(preset("quantspec", question.workload), question, ACCEPTANCES)


def test_at_the_predicted_acceptance_it_is_the_prediction(speedups: SpeculationMap, question: Question) -> None:
    plan = preset("quantspec", question.workload)
    plain = predict(preset("autoregressive", question.workload), question.shape, question.profile)
    known = predict(plan, question.shape, question.profile)
    here = speculation_map(plan, question, [known.acceptance.best])
    assert here.speedup[0, plan.speculation.gamma - 1] == pytest.approx(plain.best.tpot_ms / known.best.tpot_ms)


def test_nothing_accepted_yields_one_token_a_round(speedups: SpeculationMap) -> None:
    """Then more drafts only cost, and a round is slower for each."""
    assert (np.diff(speedups.speedup[0]) < 0).all()


def test_speed_rises_with_acceptance_and_fewer_drafts_are_best_where_it_is_low(speedups: SpeculationMap) -> None:
    assert (np.diff(speedups.speedup, axis=0) > 0).all()
    best = speedups.best_gammas[speedups.best_gammas > 0]
    assert (np.diff(best) >= 0).all()


def test_the_optimum_is_the_planner_s_best_gamma(speedups: SpeculationMap, question: Question) -> None:
    """Whose acceptance moves a little with gamma, so a neighbour may be as fast."""
    (cell,) = best_gamma("meta-llama/Llama-3.1-8B", "h200", preset="quantspec", contexts=(65_536,), batches=(1,))
    gamma, gain = speedups.optimum
    assert abs(gamma - cell.gamma) <= 1
    assert gain == pytest.approx(cell.speedup, rel=0.02)


def test_no_gamma_is_best_where_all_are_slower(speedups: SpeculationMap) -> None:
    slow = replace(speedups, speedup=speedups.speedup * 0 + 0.9)
    assert not slow.best_gammas.any()
