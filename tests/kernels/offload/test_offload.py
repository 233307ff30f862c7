"""Copies from the host and residency of chosen tokens: against a simulation of least-recently-used slots in Python."""

from itertools import product

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.offload import (
    MAX_SLOTS,
    SlotTable,
    allocate_slots,
    copy_prefix,
    copy_prefix_cost,
    gather_cost,
    gather_into_slots,
)
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.host_link import GATHER_LINK_SHARE, HostLink
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import HostLayers
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


@pytest.mark.parametrize(
    "dtype, entry, spare", [(torch.uint8, (32, 16), 0), (torch.float16, (6,), 3), (torch.bfloat16, (10,), 0)]
)
@BACKENDS
def test_the_leading_entries_are_copied_and_no_others(
    backend: str, spare: int, dtype: torch.dtype, entry: tuple[int, ...], device: str
) -> None:
    source = torch.arange(3 * 2 * 9 * torch.Size(entry).numel(), device=device).reshape(3, 2, 9, *entry).to(dtype)
    out = torch.full((3, 2, 9 + spare, *entry), 77, dtype=dtype, device=device)
    copy_prefix(source, out, torch.tensor([4, 0, 9], dtype=torch.int32, device=device), backend=backend)
    for row, count in enumerate([4, 0, 9]):
        assert torch.equal(out[row, :, :count], source[row, :, :count])
        assert (out[row, :, count:] == 77).all()


def test_a_copy_of_entries_that_are_no_whole_words_is_refused() -> None:
    tensor = torch.zeros(1, 1, 4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="entries of 3 bytes; allowed: contiguous multiples of 4"):
        copy_prefix(tensor, tensor.clone(), torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="allowed: equal, or more entries in out"):
        copy_prefix(tensor, tensor[:, :, :2], torch.ones(1, dtype=torch.int32))


class Simulated:
    """Slots of one set, by the words of `allocate_slots`."""

    def __init__(self, slots: int) -> None:
        self.units: list[int | None] = [None] * slots
        self.used = [0] * slots
        self.now = 0

    def take(self, chosen: list[int]) -> list[tuple[int, int]]:
        """The loads of a step, (unit, slot)."""
        self.now += 1
        for unit in set(chosen) & set(self.units):
            self.used[self.units.index(unit)] = self.now
        missing = [unit for unit in chosen if unit not in self.units]
        oldest = sorted(range(len(self.units)), key=lambda slot: (self.used[slot], slot))[: len(missing)]
        for unit, slot in zip(missing, sorted(oldest), strict=True):
            self.units[slot], self.used[slot] = unit, self.now
        return list(zip(missing, sorted(oldest), strict=True))


def choices(generator: torch.Generator, units: int, maximum: int, sets: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Distinct units of every set, in random order, and how many hold."""
    index = torch.rand(*sets, units, generator=generator).argsort(-1)[..., :maximum].int().contiguous()
    return index, torch.randint(0, maximum + 1, sets, generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("units, slots, maximum", [(40, 12, 9), (40, 40, 17), (200, 33, 33), (9, 4, 4)])
@BACKENDS
def test_slots_hold_what_was_chosen_and_forget_what_was_used_least_recently(
    backend: str, units: int, slots: int, maximum: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(units + slots)
    batch, sets = 2, 3
    table = SlotTable.allocate(batch, sets, units, slots, torch.device(device))
    simulated = {(row, token_set): Simulated(slots) for row in range(batch) for token_set in range(sets)}
    chosen_units = loaded = 0
    for _ in range(12):
        index, count = choices(generator, units, maximum, (batch, sets))
        loads = allocate_slots(table, index.to(device), count.to(device), backend=backend)
        for (row, token_set), slots_of_set in simulated.items():
            chosen = index[row, token_set, : count[row, token_set]].tolist()
            expected = slots_of_set.take(chosen)
            loaded_units = int(loads.count[row, token_set])
            pairs = zip(
                loads.units[row, token_set, :loaded_units].tolist(),
                loads.into[row, token_set, :loaded_units].tolist(),
                strict=True,
            )
            assert list(pairs) == expected
            assert loads.slots[row, token_set, : len(chosen)].tolist() == [
                slots_of_set.units.index(unit) for unit in chosen
            ]
            chosen_units, loaded = chosen_units + len(chosen), loaded + loaded_units
    assert int(table.requested.sum()) == chosen_units
    assert int(table.loaded.sum()) == loaded < chosen_units
    for (row, token_set), slots_of_set in simulated.items():
        assert table.unit_of[row, token_set].tolist() == [-1 if unit is None else unit for unit in slots_of_set.units]
        held = {unit: slot for slot, unit in enumerate(slots_of_set.units) if unit is not None}
        assert table.slot_of[row, token_set].tolist() == [held.get(unit, -1) for unit in range(units)]
    table.reset()
    for reset, new in zip(
        vars(table).values(),
        vars(SlotTable.allocate(batch, sets, units, slots, table.used.device)).values(),
        strict=True,
    ):
        assert torch.equal(reset, new)


def step(table: SlotTable, *units: int) -> list[int]:
    """The slots that units of the only set get."""
    index, count = torch.tensor([[units]], dtype=torch.int32), torch.tensor([[len(units)]], dtype=torch.int32)
    return allocate_slots(table, index, count).slots.flatten().tolist()


def test_a_table_that_forgets_its_units_keeps_the_order_in_which_slots_were_used() -> None:
    """Slots 0, 1 and 2 were used in this order, then slot 0 again: 1 is the oldest, then 2."""
    table = SlotTable.allocate(1, 1, 9, 3, torch.device("cpu"))
    assert [step(table, unit) for unit in (4, 5, 6, 4)] == [[0], [1], [2], [0]]
    table.forget()
    assert table.slot_of.unique().tolist() == table.unit_of.unique().tolist() == [-1]
    assert [step(table, unit) for unit in (4, 5, 6)] == [[1], [2], [0]]
    assert (int(table.requested), int(table.loaded), int(table.step)) == (7, 6, 7)  # forgetting is no reset


def test_the_first_rows_of_a_table_are_its_own() -> None:
    table = SlotTable.allocate(2, 1, 9, 3, torch.device("cpu"))
    assert step(table.first(1), 4, 5) == [0, 1]
    assert table.slot_of[:, 0].tolist() == [[-1, -1, -1, -1, 0, 1, -1, -1, -1], [-1] * 9]
    assert table.used[:, 0].tolist() == [[1, 1, 0], [0] * 3]
    assert (table.requested.tolist(), table.loaded.tolist(), int(table.step)) == ([[2], [0]], [[2], [0]], 1)


def test_a_table_has_one_slot_or_more_and_states_its_memory() -> None:
    for slots in (0, -1, MAX_SLOTS + 1):
        with pytest.raises(ValueError, match=f"{slots} slots on the device; allowed: 1 to {MAX_SLOTS}"):
            SlotTable.allocate(1, 1, 4, slots, torch.device("cpu"))
    for slots in (1, MAX_SLOTS):
        table = SlotTable.allocate(2, 3, 5, slots, torch.device("cpu"))
        assert table.bytes == 2 * 3 * (5 + 2 * slots) * 4


def test_the_same_choice_again_loads_nothing() -> None:
    table = SlotTable.allocate(1, 1, 100, 10, torch.device("cpu"))
    index, count = torch.arange(10, dtype=torch.int32)[None, None], torch.tensor([[10]], dtype=torch.int32)
    assert int(allocate_slots(table, index, count).count) == 10
    assert int(allocate_slots(table, index.flip(2), count).count) == 0
    assert int(allocate_slots(table, index + 2, count).count) == 2  # two of ten differ


@pytest.mark.parametrize(("head_dim", "page", "sets"), [(16, 1, 1), (16, 4, 2), (24, 1, 2), (24, 4, 1)])
@BACKENDS
def test_units_are_gathered_into_their_slots(backend: str, head_dim: int, page: int, sets: int, device: str) -> None:
    generator = torch.Generator().manual_seed(page)
    source = tuple(torch.randn(2, 2, 30 * page, head_dim, generator=generator).to(device) for _ in "kv")
    out = tuple(torch.zeros(2, 2, 20 * page + 5, head_dim, device=device) for _ in "kv")
    table = SlotTable.allocate(2, sets, 30, 20, torch.device(device))
    for _ in range(4):
        index, count = choices(generator, 30, 18, (2, sets))
        loads = allocate_slots(table, index.to(device), count.to(device), backend=backend)
        gather_into_slots(source, out, loads, page, backend=backend)
        for row in range(2):
            for head in range(2):
                row_and_set = row, head % sets
                for unit, slot in zip(
                    index[row_and_set][: count[row_and_set]],
                    loads.slots[row_and_set][: count[row_and_set]],
                    strict=True,
                ):
                    for held, slots in zip(source, out, strict=True):
                        unit_tokens = held[row, head, unit * page : (unit + 1) * page]
                        assert torch.equal(slots[row, head, slot * page : (slot + 1) * page], unit_tokens)
    assert all((store[:, :, 20 * page :] == 0).all() for store in out)


@pytest.mark.parametrize("programs", [1, 3, 10, 264])
def test_programs_share_the_loads_of_all_rows_and_heads(
    programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few or as many as there are; each takes several sets in turn, or a part of one."""
    monkeypatch.setattr("ridgeplan.kernels.offload.triton.CONCURRENT", programs)
    source = tuple(torch.randn(3, 2, 200, 16, device=device) for _ in "kv")
    out = tuple(torch.zeros(3, 2, 100, 16, device=device) for _ in "kv")
    table = SlotTable.allocate(3, 2, 200, 100, torch.device(device))
    index = torch.stack([torch.randperm(200)[:100] for _ in range(6)]).view(3, 2, 100).int().to(device)
    count = torch.tensor([[100, 40], [0, 7], [99, 100]], dtype=torch.int32, device=device)
    loads = allocate_slots(table, index, count)
    gather_into_slots(source, out, loads, concurrent=True, backend="triton")
    for row, head in product(range(3), range(2)):
        chosen = slice(int(count[row, head]))
        for held, slots in zip(source, out, strict=True):
            stored = slots[row, head, loads.slots[row, head, chosen].long()]
            assert torch.equal(stored, held[row, head, index[row, head, chosen].long()])


@pytest.mark.parametrize("head_dim, dtype", [(128, torch.bfloat16), (64, torch.bfloat16), (10, torch.int64)])
def test_a_program_has_as_many_bytes_in_flight_whatever_a_token_takes(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else tokens of 64 channels, or their codes, load at half the link's rate."""
    launched: list[int] = []
    kernel = "ridgeplan.kernels.offload.triton._gather_kernel"
    monkeypatch.setattr(kernel, {(16,): lambda *_, ROWS, **__: launched.append(ROWS)})
    source, out = (tuple(torch.zeros(1, 8, tokens, head_dim, dtype=dtype) for _ in "kv") for tokens in (200, 100))
    table, count = SlotTable.allocate(1, 8, 200, 100, torch.device("cpu")), torch.ones(1, 8, dtype=torch.int32)
    loads = allocate_slots(table, torch.zeros(1, 8, 4, dtype=torch.int32), count, backend="reference")
    gather_into_slots(source, out, loads, concurrent=True, backend="triton")
    assert 8192 <= launched[0] * 2 * head_dim * dtype.itemsize <= 12288


def test_the_cost_model_moves_what_the_kernels_declare() -> None:
    """At a link of 1 byte a second, seconds are bytes: those of a stream, and of the loads of a step."""
    link = Machine(
        memory_bytes=0, element_bytes=2, num_sms=1, bandwidth_bytes_per_s=1, compute_flops=1, host_link_bytes_per_s=1,
        rates={}, pass_dispatch_s=0, layer_dispatch_s=0, prefill_layer_dispatch_s=0, decode_gemm_rows=1,
        fused_swiglu_rows=0,
    )  # fmt: skip
    shape = load_shape("Llama-3.1-8B")
    plan = preset("specontext", Workload("m", "h200", 4096, batch=2))
    strategy, host = strategy_of(plan, shape, link, 1.0), HostLayers(3, 2 * 4096)
    keys = torch.zeros(2, 8, 4096, 128, dtype=torch.bfloat16)
    missing = round(2048 * (1 - strategy.offload.overlap))
    missed = strategy.with_terms(offload_overlap=1 - missing / 2048)
    _, copied = HostLink(shape, link, missed, host).load_seconds(4096, 2048, 1)
    assert copied * GATHER_LINK_SHARE == pytest.approx(gather_cost((keys, keys), missing).read_bytes)
    streamed = HostLink(shape, link, strategy, host).stream_seconds(4096)
    assert streamed == 2 * copy_prefix_cost(keys, 4096 - 192).read_bytes


def test_errors_name_the_shapes() -> None:
    table = SlotTable.allocate(1, 1, 100, 10, torch.device("cpu"))
    index, count = torch.zeros(1, 1, 11, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index \[1, 1, 11\] of slots \[1, 1, 10\]; allowed: no more than slots"):
        allocate_slots(table, index, count)
    with pytest.raises(ValueError, match="0 slots on the device; allowed: 1 to 16384"):
        SlotTable.allocate(1, 1, 100, 0, torch.device("cpu"))
    loads = allocate_slots(table, index[:, :, :4], count)
    keys = torch.zeros(1, 2, 100, 8)
    with pytest.raises(ValueError, match="disagree, or have strides"):
        gather_into_slots((keys, keys), (keys[..., :4], keys[..., :4]), loads)
