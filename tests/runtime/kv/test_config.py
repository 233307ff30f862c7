"""Sizes of caches, by hand."""

import pytest

from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.kv.config import KVCacheConfig


def test_a_plan_gives_everything():
    plan = preset("quantspec", Workload("m", "h", context=4096, new_tokens=100, batch=3))
    expected = KVCacheConfig(3, 4196, KVFormat.HIERARCHICAL, 128, gamma=4, draft_codes=DraftCodes.UPPER, new_tokens=100)
    assert KVCacheConfig.of(plan, 2) == expected


@pytest.mark.parametrize(
    ("kv_format", "quantized", "buffered", "slots"),
    [
        (KVFormat.FULL, False, False, 1000 + 4 + 1),
        (KVFormat.SHADOW, True, False, 1000 + 4 + 1),
        (KVFormat.INT8, True, True, 2 * 64 + 4 + 1),
        (KVFormat.HIERARCHICAL, True, True, 2 * 64 + 4 + 1),
    ],
)
def test_slots_hold_the_recent_tokens_and_a_round(kv_format, quantized, buffered, slots):
    config = KVCacheConfig(2, 1000, kv_format, 64, gamma=4)
    assert (config.format.quantized, config.buffered, config.slots(1000)) == (quantized, buffered, slots)
    # 15 groups of 64 are full at 1000 tokens, of which the last stays recent.
    assert config.quantized_groups(1000) == (14 if quantized else 0)
    assert config.groups(1000) == (14 if quantized else 1)


def test_no_pass_goes_beyond_the_end_of_a_group():
    config = KVCacheConfig(2, 1000, KVFormat.INT8, 64)

    def passes(*stored, tokens=40, most=16):
        return [(one.start, one.stop) for one in config.passes(stored, tokens, most)]

    assert passes(100) == [(0, 16), (16, 28), (28, 40)]  # 128 stored tokens end a group
    assert passes(100, 124) == [(0, 4), (4, 20), (20, 28), (28, 40)]
    assert passes(128, tokens=3) == [(0, 3)]
    assert passes(100, tokens=0) == []
