"""The best gamma of a grid is the best of all gammas, one at a time."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("name", ["quantspec", "specattn"])
def test_every_cell_is_the_best_of_all_gammas(h200_profile, name):
    shape = load_shape(LLAMA)
    cells = planner.best_gamma(LLAMA, "h200", preset=name, contexts=(4096, 65536), batches=(1, 8), profile=h200_profile)
    assert [(cell.context, cell.batch) for cell in cells] == [(4096, 1), (4096, 8), (65536, 1), (65536, 8)]
    for cell in cells:
        workload = Workload(LLAMA, "h200", cell.context, 1024, cell.batch)
        plan = preset(name, workload)
        plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in range(1, 16)]
        times = [planner.predict(one, shape, h200_profile).best.tpot_ms for one in plans]
        plain = planner.predict(preset("autoregressive", workload), shape, h200_profile)
        assert cell.tpot_ms == pytest.approx(min(times))
        assert cell.gamma == 1 + times.index(min(times))
        assert cell.speedup == pytest.approx(plain.best.tpot_ms / min(times))
        assert cell.fits


def test_cells_say_whether_they_fit(h200_profile):
    cells = planner.best_gamma(LLAMA, "h200", contexts=(131_072,), batches=(1, 64), profile=h200_profile)
    assert [cell.fits for cell in cells] == [True, False]
    tight = planner.best_gamma(LLAMA, "h200", contexts=(4096,), batches=(1,), profile=h200_profile, memory_limit=1e9)
    assert not tight[0].fits


def test_of_gammas_only_those_that_fit_are_chosen(h200_profile):
    """A draft more is a token more of every sequence in the cache, so a limit can lie between two gammas."""
    shape, workload = load_shape(LLAMA), Workload(LLAMA, "h200", 4096, 1024, 64)
    plan = preset("quantspec", workload)
    plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in (1, 2)]
    smallest, next_one = (planner.predict(one, shape, h200_profile).best for one in plans)
    assert next_one.tpot_ms < smallest.tpot_ms
    limit = (smallest.peak_memory_bytes + next_one.peak_memory_bytes) / 2
    (cell,) = planner.best_gamma(
        LLAMA, "h200", contexts=(4096,), batches=(64,), profile=h200_profile, memory_limit=limit
    )
    assert (cell.gamma, cell.fits) == (1, True)
    assert cell.tpot_ms == pytest.approx(smallest.tpot_ms)


def test_contexts_end_at_the_models_limit():
    cells = planner.best_gamma("Qwen/Qwen2.5-0.5B", "h200", batches=(1,))
    assert [cell.context for cell in cells] == [4096, 16384, 32768]


def test_a_preset_without_drafts_is_refused():
    with pytest.raises(planner.PlanError, match="preset 'int8' drafts nothing; allowed: one that speculates"):
        planner.best_gamma(LLAMA, "h200", preset="int8")
    with pytest.raises(planner.PlanError, match="unknown preset"):
        planner.best_gamma(LLAMA, "h200", preset="int9")
