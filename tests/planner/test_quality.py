"""Quality: which constraint admits which plan."""

import pytest

from ridgeplan.planner.quality import Quality, losses, quality_of
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

WORKLOAD = Workload("m", "h200", 32768)


@pytest.mark.parametrize(
    "name, quality, lost",
    [
        ("autoregressive", Quality.EXACT, 0),
        ("quantspec-exact", Quality.EXACT, 0),
        ("quantspec-weights", Quality.EXACT, 0),  # drafts never change the output
        ("specattn", Quality.EXACT, 0),
        ("int8", Quality.NEAR_LOSSLESS, 1),
        ("quantspec", Quality.NEAR_LOSSLESS, 1),
        ("int8-weights", Quality.NEAR_LOSSLESS, 1),
        ("int8-weights-int8", Quality.NEAR_LOSSLESS, 2),
        ("quantspec-int8", Quality.NEAR_LOSSLESS, 2),
        ("int4-weights", Quality.LOSSY, 1),
        ("int4-weights-int8", Quality.LOSSY, 2),
        ("snapkv", Quality.LOSSY, 1),
        ("quest", Quality.LOSSY, 1),
        ("specontext", Quality.LOSSY, 1),
        ("dapq-quantspec", Quality.LOSSY, 2),  # INT8 KV does not make an eviction near-lossless
    ],
)
def test_quality_of_presets(name, quality, lost):
    plan = preset(name, WORKLOAD)
    assert quality_of(plan) is quality
    assert len(losses(plan)) == lost


def test_losses_are_named_with_the_published_figure():
    assert losses(preset("dapq-quantspec", WORKLOAD)) == [
        "INT8 KV: perplexity +0.16% on WikiText-2, +0.004% on C4 (QuantSpec, Table 2)",
        "dapq keeps 1024 of 32768 prompt tokens: RULER 77.56 of 96.65 with 1024 tokens (DapQ, Table 11)",
    ]
    assert losses(preset("quest", WORKLOAD)) == ["quest reads 2048 tokens a step"]


def test_kinds_of_8_bit_weights_have_figures_of_their_own():
    plain, hierarchical = losses(preset("int8-weights", WORKLOAD))[0], losses(preset("quantspec-int8", WORKLOAD))[1]
    assert plain.startswith("INT8 weights (plain): ")
    assert hierarchical.startswith("INT8 weights (hierarchical): ")


def test_a_constraint_admits_its_own_quality_and_stricter_ones():
    admitted = {one: [other for other in Quality if one.allows(other)] for one in Quality}
    assert admitted == {
        Quality.EXACT: [Quality.EXACT],
        Quality.NEAR_LOSSLESS: [Quality.EXACT, Quality.NEAR_LOSSLESS],
        Quality.LOSSY: [Quality.EXACT, Quality.NEAR_LOSSLESS, Quality.LOSSY],
    }
