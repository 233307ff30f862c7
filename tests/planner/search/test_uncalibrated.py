"""Plans whose kernels a profile has no rates of are priced by others' rates, shown, and not recommended."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import uncalibrated

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def streaming(h200_profile):
    """A profile whose sparse kernels read as fast as attention to all upper codes."""
    kinds = ("two_bit_scan", "sparse_attention", "progressive_attention")
    rates = dict.fromkeys(kinds, h200_profile.classes["attention_int4"])
    return replace(h200_profile, classes={**h200_profile.classes, **rates})


@pytest.fixture
def dense(h200_profile):
    """A profile from before sparse drafts."""
    kinds = ("two_bit_scan", "sparse_attention", "progressive_attention", "top_k")
    return replace(h200_profile, classes={k: v for k, v in h200_profile.classes.items() if k not in kinds})


def test_only_sparse_drafts_need_their_own_classes(dense, streaming):
    workload = Workload(LLAMA, "h200", 120_000)
    for name, needed in (("quantspec", False), ("autoregressive", False), ("specattn-int4", True)):
        assert (uncalibrated(preset(name, workload), dense) is not None) == needed
        assert uncalibrated(preset(name, workload), streaming) is None


def test_a_faster_sparse_plan_is_recommended_once_it_is_calibrated(dense, streaming):
    before = planner.recommend(LLAMA, "h200", 120_000, profile=dense)
    assert not before.plan.speculation.sparse
    (sparse,) = (one for one in before.alternatives if one.preset == "specattn-int4")
    assert "not calibrated" in sparse.rejected
    assert "test H200" in sparse.rejected
    assert planner.recommend(LLAMA, "h200", 120_000, profile=streaming).plan.speculation.sparse
