"""A cache whose layers keep different parts of a prompt: where tokens stand, flushes, and memory as predicted."""

import pytest
import torch

from ridgeplan.kernels.kv_cache import dequantize
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Eviction,
    KVCache,
    KVFormat,
    Plan,
    Speculation,
    Workload,
)
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.validate.random_model import llama_like_shape

GROUP, CPU = 32, torch.device("cpu")
SHAPE = llama_like_shape(layers=3, hidden=32, intermediate=64, q_heads=2, kv_heads=2, head_dim=16)
BUDGETS = (96, 64, 32)  # a pyramid over three layers, of groups of 32


def build(kv_format, new_tokens=200):
    config = KVCacheConfig(2, 500, KVFormat(kv_format), GROUP, gamma=2, budgets=BUDGETS, new_tokens=new_tokens)
    return Cache(SHAPE, config, CPU, torch.float32)


def fill(cache, prompts, kv):
    cache.reset(2)
    for row, tokens in enumerate(prompts):
        for layer, kept in enumerate(cache.config.kept(tokens)):
            cache.store_prompt(layer, row, *(store[layer, row, :, :kept] for store in kv))
        cache.finish_prompt(row, tokens)


@pytest.fixture
def kv():
    """Keys and values [layers, rows, kv_heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, 2, 400, 16, generator=generator) for _ in "kv"]


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_positions_stored_and_slots_are_told_apart(kv_format, kv):
    cache = build(kv_format)
    fill(cache, (300, 70), kv)
    assert cache.lengths.tolist() == [96, 70]
    assert [cache.stored(layer).tolist() for layer in range(3)] == [
        [96, 70],
        [64, 38 if kv_format.quantized else 64],
        [32, 6 if kv_format.quantized else 32],
    ]
    metadata = AttentionMetadataBuilder(cache).target_metadata(2)
    for layer, stored in enumerate(cache.stored(layer) for layer in range(3)):
        at = metadata.layer_metadata(layer)
        assert at.positions.tolist() == [[300, 301], [70, 71]]
        codes = cache.quantized(stored) if kv_format.buffered else torch.zeros_like(stored)
        assert at.slots[:, 0].tolist() == (stored - codes).tolist()
        assert at.end.tolist() == (stored - codes + 1).tolist()


@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.HIERARCHICAL, KVFormat.SHADOW])
def test_flushes_keep_every_token_of_every_layer(kv_format, kv):
    """Token by token over several flushes: all layers flush at once, and nothing is lost or doubled."""
    cache = build(kv_format)
    fill(cache, (300, 70), kv)
    stored = [[int(cache.stored(layer)[row]) for row in range(2)] for layer in range(3)]
    for step in range(100):
        metadata = AttentionMetadataBuilder(cache).target_metadata(1)
        for layer in range(3):
            for store, new in zip(cache.full(layer), kv, strict=True):
                for row in range(2):
                    store[row, :, metadata.layer_metadata(layer).slots[row, 0]] = new[
                        layer, row, :, stored[layer][row] + step
                    ]
        ending = cache.max_tokens() == 1
        cache.advance(torch.ones(2, dtype=torch.int32))
        assert not kv_format.buffered or torch.equal(ending, cache.lengths % GROUP == 0)
    for layer in range(3):
        keys, _ = dequantize(cache.codes(layer), lower=kv_format.buffered)
        for row in range(2):
            count = stored[layer][row] + 100
            assert cache.stored(layer)[row] == count
            codes = int(cache.quantized(torch.tensor(count)))
            assert codes > 0
            # Values within 4 have steps of up to 8/15, halved by rounding, or 8/15/16 where the last one is clamped.
            error = (keys[row, :, :codes] - kv[0][layer, row, :, :codes]).abs().max()
            assert error < (0.27 if kv_format is KVFormat.SHADOW else 0.034)
            first = 0 if kv_format.buffered else codes
            full = cache.full(layer)[0][row, :, first : first + count - codes]
            assert torch.equal(full, kv[0][layer, row, :, codes:count])


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_storage_is_what_the_planner_predicts(policy, kv_format, share):
    shape = llama_like_shape(layers=4, hidden=128, intermediate=64, q_heads=2, kv_heads=2, head_dim=64)
    plan = Plan(
        Workload("m", "h", 8192, 512, 2),
        kv=KVCache(kv_format),
        eviction=Eviction(policy, share=share),
        speculation=Speculation(3, DraftCodes.UPPER if kv_format in ("int4x2", "bf16+int4") else DraftCodes.FULL),
    )
    cache = Cache(shape, KVCacheConfig.of(plan, shape.layers), CPU, torch.bfloat16)
    predicted = predicted_memory(plan, shape, Device(memory_bytes=10**12, element_bytes=2, num_sms=1))
    # The planner counts codes of the latest tokens too, up to two groups that the runtime holds in full precision.
    planes = {"bf16": 0, "bf16+int4": 1}.get(kv_format, 2)
    group_bytes = shape.layers * 2 * 2 * 128 * (2 * 64 * planes / 2 + 8)
    spare = predicted.kv + predicted.buffers - cache.bytes
    assert -0.001 * cache.bytes <= spare <= 2 * group_bytes * min(planes, 1) + 0.001 * cache.bytes


def test_a_quarter_in_int4x2_is_more_than_seven_and_a_half_times_smaller():
    """The tokens in full precision apart: 4 x 16 bits over 8 bits with scales and minima."""
    shape = llama_like_shape(layers=1, hidden=128, intermediate=64, q_heads=1, kv_heads=1, head_dim=128)

    def storage(kv_format, share):
        plan = Plan(
            Workload("m", "h", 32768, 1),
            kv=KVCache(kv_format),
            eviction=Eviction("dapq", share=share) if share < 1 else Eviction(),
        )
        return Cache(shape, KVCacheConfig.of(plan, 1), CPU, torch.bfloat16).stores[0]

    full, evicted = storage(KVFormat.FULL, 1.0), storage(KVFormat.HIERARCHICAL, 0.25)
    assert full.bytes / evicted.coded[0].codes.bytes > 7.5
