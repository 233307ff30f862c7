"""Caches with layers on the host hold what caches without hold; places, windows and moves are counted by hand."""

import math
from dataclasses import replace

import pytest
import torch

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import pack_token_rows
from ridgeplan.kernels.offload import (
    SlotTable,
    flush_codes_to_host,
    flush_to_host,
    flush_to_host_cost,
)
from ridgeplan.planner.capacity import offloaded_layers
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import offload_layers, resident_memory
from ridgeplan.roofline.plan.plan import DraftCodes, HostPart, KVCache, KVFormat, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import buffers
from ridgeplan.runtime.buffers import HostMemory, split_bytes
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.offload.host_store import HostKVStore
from ridgeplan.runtime.offload.layer_mover import LayerMover
from ridgeplan.runtime.offload.slot_store import ALL_LAYERS, SlotTables
from ridgeplan.runtime.offload.streaming import LayerStream, Window
from ridgeplan.validate.random_model import llama_like_shape

CPU = torch.device("cpu")
GROUP = 32
SHAPE = llama_like_shape(layers=4, hidden=32, intermediate=64, q_heads=2, kv_heads=2, head_dim=16)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def built(kv=KVFormat.HIERARCHICAL, gamma=3, host_layers=0, **changes):
    upper = gamma > 0 and kv is KVFormat.HIERARCHICAL
    codes = DraftCodes.UPPER if upper else DraftCodes.FULL
    config = KVCacheConfig(2, 600, kv, GROUP, gamma, codes, host_layers=host_layers, offload=True, **changes)
    return Cache(SHAPE, config, CPU, torch.float32)


def prompt(cache, lengths):
    """Stores the same random prompts in any cache."""
    generator = torch.Generator().manual_seed(0)
    cache.reset(2)
    for row, tokens in enumerate(lengths):
        for layer in range(SHAPE.layers):
            keys, values = torch.randn(2, 2, tokens, 16, generator=generator)
            cache.store_prompt(layer, row, keys, values)
        cache.finish_prompt(row, tokens)


def grow(cache, rounds):
    """Rounds of one token for each row, with the same random keys and values in any cache."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        metadata = AttentionMetadataBuilder(cache).target_metadata(1)
        new = torch.randn(SHAPE.layers, 2, 2, 2, 1, 16, generator=generator)
        for layer in range(SHAPE.layers):
            for store, tokens in zip(cache.full(layer), new[layer], strict=True):
                for row in range(2):
                    store[row, :, metadata.layer_metadata(layer).slots[row]] = tokens[row]
        cache.advance(torch.ones(2, dtype=torch.int32))


def read(cache, metadata):
    """What a pass reads of every layer, copies of codes included."""
    results = []
    for layer in range(SHAPE.layers):
        with cache.layer_kv(layer, metadata.layer_metadata(layer)) as reads:
            tensors = [reads.keys, reads.values]
            parts = [reads.begin.clone(), reads.end.clone()]
            codes = None if reads.codes is None else [x.clone() for x in vars(reads.codes).values() if x is not None]
            results.append((parts, [x.clone() for x in tensors], codes))
    return results


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("host_layers", [1, 3, 4])
@pytest.mark.parametrize("part", list(HostPart))
def test_the_target_reads_the_same_codes(part, host_layers, prefetch):
    plain, offloaded = built(), built(host_layers=host_layers, host_part=part, prefetch=prefetch)
    results = []
    for cache in (plain, offloaded):
        prompt(cache, [300, 97])
        grow(cache, 70)
        metadata = AttentionMetadataBuilder(cache).target_metadata(2)
        results.append([read(cache, metadata) for _ in range(2)])  # twice: slots are used again
    groups = (plain.quantized(plain.lengths) // GROUP).tolist()
    assert groups == [370 // GROUP - 1, 167 // GROUP - 1]
    for first, second in zip(results[0], results[1], strict=True):
        for layer, (ours, theirs) in enumerate(zip(first, second, strict=True)):
            assert [x.tolist() for x in ours[0]] == [x.tolist() for x in theirs[0]]
            for a, b in zip(ours[2], theirs[2], strict=True):
                for row, count in enumerate(groups):
                    assert torch.equal(a[row, :, :count], b[row, :, :count]), layer


def test_full_precision_layers_are_copied_with_their_recent_tokens_behind():
    plain, offloaded = built(KVFormat.FULL), built(KVFormat.FULL, host_layers=2)
    results = []
    for cache in (plain, offloaded):
        prompt(cache, [300, 97])
        grow(cache, 70)
        results.append(read(cache, AttentionMetadataBuilder(cache).target_metadata(1)))
    for ours, theirs in zip(*results, strict=True):
        for row, length in enumerate([370, 167]):
            assert int(theirs[0][1][row]) - int(theirs[0][0][row]) == length + 1
            for a, b in zip(ours[1], theirs[1], strict=True):
                assert torch.equal(a[row, :, :length], b[row, :, :length])


def test_drafts_read_the_first_and_the_latest_groups():
    """Of 10 groups a window of 4 holds group 0 and 7 to 9; in full precision they are one run with the buffer."""
    codes = built(host_layers=2, window_tokens=4 * GROUP)
    full = built(KVFormat.FULL, host_layers=2, window_tokens=4 * GROUP)
    engine = built()
    for cache in (codes, full, engine):
        prompt(cache, [300, 40])
        grow(cache, 70)
    window, every = codes.stores[0].coded_layer(3)[0].window, engine.codes(3)
    held = {0: 0, 7: 1, 8: 2, 9: 3}
    for group, place in held.items():
        assert int(window.place(torch.tensor(group))) == place
        assert torch.equal(window.codes.key_upper[0, :, place], every.key_upper[0, :, group])
    near = AttentionMetadataBuilder(codes).draft_metadata(0).layer_metadata(3)
    assert near.groups.tolist() == [4, 2]
    assert AttentionMetadataBuilder(codes).draft_metadata(0).layer_metadata(0).groups.tolist() == [10, 2]
    reads = AttentionMetadataBuilder(full).draft_metadata(0).layer_metadata(3)
    assert (reads.end - reads.begin).tolist() == [4 * GROUP + 370 - 320 + 1, 110 + 1]
    plain = built(KVFormat.FULL)
    prompt(plain, [300, 40])
    grow(plain, 70)
    seen = full.full(3)[0][0, :, int(reads.begin[0]) : int(reads.end[0]) - 1]
    tokens = plain.full(3)[0][0]
    kept = torch.cat([tokens[:, :32], tokens[:, 224:370]], dim=1)
    expected = {tuple(token.flatten().tolist()) for token in kept.unbind(1)}
    assert {tuple(token.flatten().tolist()) for token in seen.unbind(1)} == expected


def test_a_window_takes_from_codes_what_prompts_and_flushes_would_have_written():
    config = built(host_layers=1, window_tokens=4 * GROUP).config
    written, taken = Window.allocate(SHAPE, config, CPU), Window.allocate(SHAPE, config, CPU)
    keys, values = torch.randn(2, 2, 8 * GROUP, 16, generator=torch.Generator().manual_seed(2))
    codes = QuantizedKV.allocate(2, 2, 8, GROUP, 16, CPU, lower=True)
    quantize(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), codes, torch.zeros(2, dtype=torch.int32))
    written.store_prompt(1, keys, values)
    taken.take(codes, 1, 8)
    assert torch.equal(written.codes.key_upper, taken.codes.key_upper)
    assert torch.equal(written.codes.value_scale, taken.codes.value_scale)
    assert written.codes.key_lower is None


def test_layers_on_the_device_take_the_memory_of_those_that_left():
    """Memory for one layer of 17 groups: two may have 8, three 5, four 4, and rows one more in the buffer but for 1."""
    cache = built(gamma=0, host_layers=3, adaptive=True)
    movable, mover = cache.movable, LayerMover(cache)
    assert movable.staying == 1
    assert (movable.groups, cache.config.groups(600)) == (17, 17)
    assert [movable.capacity(resident) for resident in (1, 2, 3, 4)] == [17, 8, 5, 4]
    assert [mover.threshold(resident) for resident in (4, 3, 2, 1)] == [6 * 32 - 1, 7 * 32 - 1, 10 * 32 - 1, math.inf]


def test_full_precision_layers_share_memory_with_the_slots_of_those_that_left():
    """Memory for one layer of 604 slots and three of 64 + 2 x 32 + 4: Eq 7 with S = (memory - i x slots) / (4 - i)."""
    cache = built(KVFormat.FULL, host_layers=3, adaptive=True, elastic=True, target_loads=True, window_tokens=16)
    movable, mover = cache.movable, LayerMover(cache)
    slots = 4 * 32 + 2 * 32 + 4  # a group for each of four queries
    assert movable.slots == 604 + 3 * slots
    for away in range(3):
        assert mover.threshold(4 - away) == (movable.slots - away * slots) // (4 - away) - 3
    assert mover.threshold(1) == math.inf


@pytest.mark.parametrize("kv", [KVFormat.HIERARCHICAL, KVFormat.FULL])
def test_a_layer_that_leaves_changes_nothing_that_is_read(kv):
    cache, plain = built(kv, gamma=0, host_layers=3, adaptive=True), built(kv, gamma=0)
    mover = LayerMover(cache)
    for each in (cache, plain):
        if each is cache:
            each.reset(2)
            mover.start(100)
        prompt(each, [100, 65])
    assert cache.first_on_host == 4
    for step in range(300):
        mover.offload(cache.lengths.tolist())
        for each in (cache, plain):
            grow(each, 1)
        if step % 10:
            continue
        ours, theirs = (read(each, AttentionMetadataBuilder(each).target_metadata(1)) for each in (cache, plain))
        for layer in range(4):
            if kv is KVFormat.FULL:
                assert all(torch.equal(*rows) for rows in zip(seen(ours[layer]), seen(theirs[layer]), strict=True))
                continue
            for a, b in zip(ours[layer][2], theirs[layer][2], strict=True):
                for row, count in enumerate((plain.quantized(plain.lengths) // GROUP).tolist()):
                    assert torch.equal(a[row, :, :count], b[row, :, :count])
    assert mover.moved_at == sorted(mover.moved_at)
    assert len(mover.moved_at) == 3
    assert cache.first_on_host == 1


def seen(read):
    """Keys and values of each row that the next query sees in full precision."""
    (begin, end), stores, _ = read
    return [store[row, :, int(begin[row]) : int(end[row]) - 1] for row in range(2) for store in stores]


@BACKENDS
def test_a_group_moves_to_its_tokens_in_the_rows_that_are_asked(backend, device):
    recent = torch.randn(3, 2, 70, 24, device=device)
    out = torch.zeros(3, 2, 200, 24, device=device)
    first = torch.tensor([64, 0, 100], dtype=torch.int32, device=device)
    mask = torch.tensor([True, False, True], device=device)
    flush_to_host(recent, out, first, 48, mask, backend=backend)
    for row, start in ((0, 64), (2, 100)):
        assert torch.equal(out[row, :, start : start + 48], recent[row, :, :48])
        assert int((out[row].abs().sum((0, 2)) > 0).sum()) == 48
    assert (out[1] == 0).all()
    assert flush_to_host_cost(recent, 48).read_bytes == 3 * 2 * 48 * 24 * 4
    with pytest.raises(ValueError, match="disagree with a group of 71"):
        flush_to_host(recent, out, first, 71, mask)


@BACKENDS
@pytest.mark.parametrize("head_dim", [16, 48])
def test_a_group_of_codes_moves_to_its_tokens_as_rows(backend, head_dim, device):
    codes = QuantizedKV.allocate(3, 2, 1, GROUP, head_dim, device, lower=True)
    keys, values = torch.randn(2, 3, 2, GROUP, head_dim, device=device)
    quantize(keys, values, codes, torch.zeros(3, dtype=torch.int32, device=device))
    rows, words = pack_token_rows(codes), (head_dim + 16) // 8
    both = torch.zeros(3, 200, 2, 2, words, dtype=torch.int64, device=device)  # as on the host: a token's key and value
    out = both[:, :, :, 0].transpose(1, 2), both[:, :, :, 1].transpose(1, 2)
    first = torch.tensor([64, 0, 100], dtype=torch.int32, device=device)
    flush_codes_to_host(codes, out, first, torch.tensor([True, False, True], device=device), backend=backend)
    for held, packed in zip(out, rows, strict=True):
        for row, start in ((0, 64), (2, 100)):
            assert torch.equal(held[row, :, start : start + GROUP], packed[row])
        assert not held[1].any()
        assert int((held[0] != 0).any(-1).sum()) <= 2 * GROUP
    with pytest.raises(ValueError, match="disagree with a group of 3 rows"):
        flush_codes_to_host(codes, (out[0][:2], out[1]), first, torch.ones(3, dtype=torch.bool, device=device))


def test_a_pass_that_was_not_finished_is_forgotten():
    parts = [[torch.full((1, 1, 4, 8), float(layer))] for layer in range(3)]
    stream, entries = LayerStream(parts, 2, CPU), torch.tensor([4], dtype=torch.int32)
    stream.begin(entries)
    assert stream.fetch(0)[0].unique().tolist() == [0]
    stream.release(0)
    stream.reset()
    assert not stream.begun
    stream.begin(entries)
    for layer in range(3):
        assert stream.fetch(layer)[0].unique().tolist() == [layer]
        stream.release(layer)


def test_host_memory_is_refused_in_one_line_that_says_what_is_free(monkeypatch):
    monkeypatch.setattr(buffers, "available_bytes", lambda: 10**9)
    with pytest.raises(WorkloadError, match=r"needs 2\.0 GB of pinned host memory and 1\.0 GB are free; allowed: a sh"):
        HostMemory.allocate(2 * 10**9, CPU)
    shapes = [(torch.Size((3, 5)), torch.float16), (torch.Size((2, 2)), torch.float32)]
    assert split_bytes(shapes) == 512  # each begins at a multiple of 256
    first, second = HostMemory.allocate(512, CPU).split(shapes)
    assert (first.shape, second.dtype) == ((3, 5), torch.float32)


def test_a_step_that_may_choose_more_than_fits_is_refused():
    cache = built(KVFormat.FULL, host_layers=1, elastic=True, window_tokens=64)
    prompt(cache, [300, 97])
    index = torch.zeros(2, 1, 100, dtype=torch.int32)
    with pytest.raises(WorkloadError, match="budget is 64 tokens and a step may choose 100; allowed: a budget of that"):
        cache.load_chosen(3, (index, torch.ones(2, 1, dtype=torch.int32), 1))
    assert torch.equal(cache.load_chosen(0, (index, torch.ones(2, 1, dtype=torch.int32), 1)), index)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("kv, tolerance", [(KVFormat.FULL, 0), (KVFormat.INT8, 0.02)])
def test_what_is_allocated_is_what_is_priced(kv, tolerance, adaptive):
    """Codes are priced as if recent tokens had some, too. Tables of slots are allocated by the first step."""
    shape = llama_like_shape(layers=8, hidden=256, intermediate=512, q_heads=8, kv_heads=2, head_dim=64)
    device = Device(memory_bytes=10**12, element_bytes=4, num_sms=1, asynchronous=0)
    roomy = replace(preset("specontext", Workload("random", "cpu", 2048, 4096, 2)), kv=KVCache(kv))
    parts = resident_memory(shape, device, strategy_of(roomy, shape, device, 1.0))
    limit = int(parts.peak - 0.3 * parts.kv)
    plan = replace(roomy, placement=replace(roomy.placement, memory_bytes=limit, adaptive=adaptive))
    strategy = strategy_of(plan, shape, device, 1.0)
    layout = offload_layers(shape, device, strategy)
    caches = [
        Cache(shape, KVCacheConfig.of(each, 8, *offloaded_layers(each, shape, device)), CPU, torch.float32)
        for each in (plan, roomy)
    ]
    tables = layout.host.layers * 2 * 6144 * strategy.offload.slot_table_bytes
    priced = layout.memory.resident - parts.resident - tables
    assert layout.host.layers >= 4
    assert caches[0].bytes - caches[1].bytes == pytest.approx(priced, abs=tolerance * caches[1].bytes)
    last = caches[0].stores[-1]
    held = (last if isinstance(last, HostKVStore) else last.loaded).on_host
    assert sum(part.nbytes for pair in held for part in pair) == pytest.approx(layout.host_bytes, rel=0.03)


def test_a_shared_table_counts_for_every_layer_that_loads_by_it():
    """3 units of each of 2 heads are requested and 1 is missing; a layer that joins later counts from then on."""
    tables, shared = SlotTables(), SlotTable.allocate(1, 2, 64, 8, CPU)
    tables.by_layer[ALL_LAYERS] = shared
    shared.requested.fill_(3)
    shared.loaded.fill_(1)
    assert tables.counts(5) == (5 * 6, 5 * 2)
    tables.start_layer(5)
    shared.requested.fill_(2)
    assert tables.counts(6) == (5 * 6 + 6 * 4, 5 * 2)
    tables.reset()
    assert tables.counts(6) == (0, 0)


def test_a_table_of_one_layer_counts_once():
    tables, table = SlotTables(), SlotTable.allocate(1, 2, 64, 8, CPU)
    tables.by_layer[3] = table
    table.requested.fill_(3)
    table.loaded.fill_(1)
    assert tables.counts(5) == (6, 2)
