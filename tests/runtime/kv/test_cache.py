"""The split between codes and full precision follows the length alone; flushes move the right tokens."""

from itertools import product

import pytest
import torch

from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import unpack
from ridgeplan.kernels.selection.draft_planes import unpack_two_bit
from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.validate.random_model import llama_like_shape

GROUP = 32
SHAPE = llama_like_shape(layers=2, hidden=32, intermediate=64, q_heads=2, kv_heads=2, head_dim=16)
FORMATS = ["int4x2", "int8", "bf16", "bf16+int4"]


@pytest.fixture
def kv():
    """Keys and values [layers, rows, kv_heads, tokens, head_dim] of two long sequences."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 2, 300, 16, generator=generator) for _ in "kv"]


def build(kv_format, gamma=0):
    upper = gamma > 0 and kv_format in ("int4x2", "bf16+int4")
    codes = DraftCodes.UPPER if upper else DraftCodes.FULL
    return Cache(
        SHAPE, KVCacheConfig(2, 300, KVFormat(kv_format), GROUP, gamma, codes), torch.device("cpu"), torch.float32
    )


def prefill(cache, kv, lengths):
    cache.reset(2)
    for row, tokens in enumerate(lengths):
        for layer in range(2):
            cache.store_prompt(layer, row, *(store[layer, row, :, :tokens] for store in kv))
        cache.finish_prompt(row, tokens)


def decode(cache, kv, tokens):
    """Appends tokens[row] tokens to each row in one round."""
    queries = max(tokens)
    metadata = AttentionMetadataBuilder(cache).target_metadata(queries)
    at = metadata.positions.clamp_max(299)
    for layer, row in product(range(2), range(2)):
        for store, new in zip(cache.full(layer), kv, strict=True):
            store[row, :, metadata.slots[row]] = new[layer, row, :, at[row]]
    cache.advance(torch.tensor(tokens, dtype=torch.int32))


def contents(cache, layer, row):
    """Everything the target sees of a row: dequantized groups, then full-precision tokens."""
    length = int(cache.lengths[row])
    metadata = AttentionMetadataBuilder(cache).target_metadata(1)
    full = cache.full(layer)[0][row, :, int(metadata.begin[row]) : int(metadata.end[row]) - 1]
    if metadata.groups is None:
        return full
    count = int(metadata.groups[row]) * GROUP
    codes = dequantize(cache.codes(layer), lower=True)[0][row, :, :count]
    assert count + full.shape[1] == length
    return torch.cat([codes, full], dim=1)


@pytest.mark.parametrize(
    "length, groups",
    [(0, 0), (1, 0), (31, 0), (32, 0), (63, 0), (64, 1), (95, 1), (96, 2), (127, 2), (128, 3)],
)
def test_quantized_tokens_of_a_length(length, groups):
    cache = build("int4x2")
    assert cache.config.quantized_groups(length) == groups
    assert int(cache.quantized(torch.tensor(length))) == groups * GROUP


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("rounds", [[1] * 90, [3] * 30, [2, 1, 4, 3] * 9], ids=["ones", "threes", "mixed"])
def test_contents_depend_on_the_length_alone(kv_format, rounds, kv):
    gamma = 3
    cache = build(kv_format, gamma)
    lengths = [40, 61]
    prefill(cache, kv, lengths)
    for accepted in rounds:
        tokens = [min(accepted, int(max_tokens), gamma + 1) for max_tokens in cache.max_tokens()]
        decode(cache, kv, tokens)
        lengths = [a + b for a, b in zip(lengths, tokens, strict=True)]
    assert cache.lengths.tolist() == lengths
    fresh = build(kv_format, gamma)
    prefill(fresh, kv, lengths)
    for layer in range(2):
        for row in range(2):
            assert torch.equal(contents(cache, layer, row), contents(fresh, layer, row))
            error = (contents(cache, layer, row) - kv[0][layer, row, :, : lengths[row]]).abs().max()
            assert error < 0.05 if cache.config.buffered else error == 0


def test_a_shadow_holds_the_upper_codes_of_old_tokens(kv):
    cache = build("bf16+int4", gamma=3)
    prefill(cache, kv, [62, 90])
    for _ in range(4):
        decode(cache, kv, [4, 3])
    metadata = AttentionMetadataBuilder(cache).draft_metadata(0)
    assert metadata.groups.tolist() == [1, 2]
    assert metadata.begin.tolist() == [32, 64]
    expected = QuantizedKV.allocate(1, 2, 2, GROUP, 16, "cpu", lower=False)
    quantize(*(store[1, 1:, :, : 2 * GROUP] for store in kv), expected, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(cache.codes(1).key_upper[1, :, :2], expected.key_upper[0])
    assert torch.equal(cache.codes(1).value_upper[1, :, :2], expected.value_upper[0])
    assert AttentionMetadataBuilder(cache).target_metadata(1).groups is None


def test_planes_by_token_are_those_of_the_codes_whether_a_prompt_or_a_flush_wrote_them(kv):
    config = KVCacheConfig(2, 300, KVFormat.HIERARCHICAL, GROUP, 3, DraftCodes.UPPER, draft_planes=True)
    cache = Cache(SHAPE, config, torch.device("cpu"), torch.float32)
    prefill(cache, kv, [100, 62])
    for _ in range(5):
        decode(cache, kv, [4, 3])
    assert cache.quantized(cache.lengths).tolist() == [64, 32]
    assert cache.bytes > build("int4x2", gamma=3).bytes
    for layer, row, groups in ((0, 0, 2), (1, 0, 2), (0, 1, 1), (1, 1, 1)):
        codes, planes = cache.codes(layer), cache.planes(layer)
        upper = unpack(codes.key_upper[row, :, :groups], None)
        keys = torch.cat(upper, dim=-1)
        assert torch.equal(unpack_two_bit(planes.key_two_bit[row, :, :groups]), keys // 4)
        values = torch.cat(unpack(codes.value_upper[row, :, :groups], None), dim=-1).mT
        assert torch.equal(torch.cat(unpack(planes.value_rows[row, :, :groups], None), dim=-1), values)


def test_a_round_ends_with_its_row_and_at_the_next_boundary_of_a_quantized_target():
    expected = {"int4x2": [1, 32, 8], "int8": [1, 32, 8], "bf16": [237, 236, 8], "bf16+int4": [237, 236, 8]}
    for kv_format, tokens in expected.items():
        cache = build(kv_format)
        results = []
        for lengths in ([63, 64], [292, 64]):
            cache.lengths.copy_(torch.tensor(lengths))
            results += cache.max_tokens().tolist()
        assert results[:3] == tokens


def test_rows_are_active_until_their_ends():
    cache = build("int4x2")
    cache.lengths.copy_(torch.tensor([63, 64]))
    assert cache.active().tolist() == [True, True]
    cache.ends.copy_(torch.tensor([64, 64]))
    assert cache.active().tolist() == [True, False]
    assert cache.max_tokens().tolist() == [1, 1]


def test_ends_are_set_by_limits_and_stops():
    cache = build("int4x2")
    cache.lengths.copy_(torch.tensor([50, 60]))
    cache.limit(10)
    assert cache.ends.tolist() == [60, 70]
    with cache.all_stopped():
        assert cache.active().tolist() == [False, False]
    assert cache.active().tolist() == [True, True]
    cache.stop(1)
    assert cache.ends.tolist() == [60, 0]
    assert cache.active().tolist() == [True, False]


def test_a_reset_forgets_the_last_generation():
    cache = build("int4x2")
    cache.lengths.copy_(torch.tensor([63, 64]))
    cache.ends.copy_(torch.tensor([70, 80]))
    cache.reset(1)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.ends.tolist() == [300, 0]  # rows that are in use go up to the context
    assert cache.active().tolist() == [True]


def test_a_row_alone_has_the_codes_of_its_own_layers(kv):
    cache, both = build("int4x2"), build("int4x2")
    prefill(both, kv, [90, 90])
    cache.reset(1)
    for layer in range(2):
        cache.store_prompt(layer, 0, *(store[layer, 0, :, :90] for store in kv))
    cache.finish_prompt(0, 90)
    for layer in range(2):
        assert torch.equal(contents(cache, layer, 0), contents(both, layer, 0))
        assert (contents(cache, layer, 0) - kv[0][layer, 0, :, :90]).abs().max() < 0.05


def test_positions_count_from_the_texts_start_and_slots_from_the_buffers():
    lengths = torch.tensor([63, 100])
    for kv_format, slots in {"int4x2": [[64, 65], [37, 38]], "bf16+int4": [[64, 65], [101, 102]]}.items():
        cache = build(kv_format, gamma=3)
        cache.lengths.copy_(lengths)
        metadata = AttentionMetadataBuilder(cache).draft_metadata(1)
        assert metadata.positions.tolist() == [[64], [101]]
        assert metadata.slots.tolist() == [row[:1] for row in slots]
        assert metadata.end.tolist() == [row[0] + 1 for row in slots]
        assert AttentionMetadataBuilder(cache).target_metadata(3).positions.tolist() == [[63, 64, 65], [100, 101, 102]]
        assert [row[1:] for row in AttentionMetadataBuilder(cache).target_metadata(3).slots.tolist()] == slots


def test_only_targets_read_lower_codes_where_drafts_have_the_upper():
    for kv_format, lower in {"int4x2": False, "bf16+int4": False, "int8": True}.items():
        cache = build(kv_format, gamma=3)
        assert AttentionMetadataBuilder(cache).draft_metadata(0).lower == lower
        assert AttentionMetadataBuilder(cache).target_metadata(1).lower
        assert AttentionMetadataBuilder(cache).draft_metadata(0).groups is not None
    assert AttentionMetadataBuilder(build("bf16", gamma=3)).draft_metadata(0).groups is None


def test_the_buffer_never_overflows():
    cache = build("int4x2", gamma=7)
    last = max(int(cache.quantized(torch.tensor(n)) * -1 + n + 7) for n in range(300))
    assert last < cache.keys.shape[3] == 2 * GROUP + 7 + 1


def test_rows_that_do_not_advance_stay_as_they_are(kv):
    cache = build("int4x2", gamma=3)
    prefill(cache, kv, [95, 95])
    before = contents(cache, 0, 1).clone()
    decode(cache, kv, [1, 0])
    assert cache.lengths.tolist() == [96, 95]
    assert AttentionMetadataBuilder(cache).target_metadata(1).groups.tolist() == [2, 1]
    assert torch.equal(contents(cache, 0, 1), before)


def test_bytes_count_all_storage():
    cache = build("bf16")
    assert cache.bytes == 2 * 2 * 2 * 2 * 301 * 16 * 4
    assert build("int4x2").bytes < cache.bytes / 2


# Sizes of caches, by hand.


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

    def passes(*stored, tokens=40, maximum=16):
        return [(span.start, span.stop) for span in config.passes(stored, tokens, maximum)]

    assert passes(100) == [(0, 16), (16, 28), (28, 40)]  # 128 stored tokens end a group
    assert passes(100, 124) == [(0, 4), (4, 20), (20, 28), (28, 40)]
    assert passes(128, tokens=3) == [(0, 3)]
    assert passes(100, tokens=0) == []
