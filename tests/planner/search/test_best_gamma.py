"""The best gamma of a grid is the best of all gammas, one at a time."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.planner.plan import Workload
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.models import load_shape

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


def test_contexts_end_at_the_models_limit():
    cells = planner.best_gamma("Qwen/Qwen2.5-0.5B", "h200", batches=(1,))
    assert [cell.context for cell in cells] == [4096, 16384, 32768]


def test_a_preset_without_drafts_is_refused():
    with pytest.raises(planner.PlanError, match="preset 'int8' drafts nothing; allowed: one that speculates"):
        planner.best_gamma(LLAMA, "h200", preset="int8")
    with pytest.raises(planner.PlanError, match="unknown preset"):
        planner.best_gamma(LLAMA, "h200", preset="int9")
