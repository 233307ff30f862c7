"""Tiny sizes reach every CUDA C++ kernel and its variants, as an H200 would run them, for memory checkers to see."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from ridgeplan.kernels.attention.cuda import CTAS_PER_SM, AttentionVariant, Occupancy, fuses_reduction
from ridgeplan.kernels.linear import schedule as dense_schedule
from ridgeplan.kernels.linear import schedule as quantized_schedule
from ridgeplan.kernels.linear.schedule import SUM_BUFFERS, DeviceLimits, LinearSchedule
from ridgeplan.validate.kernel_calls.sizes import GROUP, LinearSize, bench_sizes

TINY = bench_sizes("tiny")
SMS = 132
H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))


def test_splits_are_reduced_by_the_last_cta_and_by_a_kernel_of_their_own() -> None:
    schedules_of_sizes = set()
    for size in TINY["attention"]:
        rows, kv_rows = size.q_heads // size.kv_heads, size.batch * size.kv_heads
        for bits, _ in size.speedups:
            variant = AttentionVariant(size.head_dim, bits, True, 8)
            ctas, _ = Occupancy(variant, SMS, H200.sm_bytes).grid(kv_rows, row_tiles=1)
            schedules_of_sizes.add((bits, fuses_reduction(ctas, kv_rows, rows * size.head_dim)))
    assert schedules_of_sizes == {(bits, fused) for bits in (0, 4, 8) for fused in (False, True)}


def test_few_and_many_query_rows_have_variants_of_their_own() -> None:
    schedules_of_sizes = set()
    for size in TINY["verification"]:
        rows = size.q_heads // size.kv_heads * size.queries
        schedules_of_sizes |= {
            (bits, next(maximum for maximum in CTAS_PER_SM if maximum >= rows)) for bits in size.bits
        }
    schedules_of_sizes |= {(bits, 8) for size in TINY["attention"] for bits, _ in size.speedups}
    assert schedules_of_sizes == set(product((0, 4, 8), CTAS_PER_SM))


def schedules(
    sizes: tuple[LinearSize, ...], make: Callable[[int, int, int], LinearSchedule | None]
) -> list[LinearSchedule]:
    """Those of the sizes that the CUDA kernels compute, `make` being of (rows, outputs, inputs)."""
    candidates = (make(rows, size.outputs, size.inputs) for size in sizes for rows, _ in size.speedups)
    return [schedule for schedule in candidates if schedule]


def dense(rows: int, outputs: int, inputs: int, gated: bool = False) -> LinearSchedule | None:
    return dense_schedule.make_dense_schedule(rows, outputs, inputs, True, gated, H200)


def int4(rows: int, outputs: int, inputs: int, gated: bool = False) -> LinearSchedule | None:
    return quantized_schedule.make_quantized_schedule(rows, outputs, inputs, GROUP, True, gated, H200)


def int8(rows: int, outputs: int, inputs: int, gated: bool = False) -> LinearSchedule | None:
    return quantized_schedule.make_quantized_schedule(rows, outputs, inputs, GROUP, True, gated, H200, 8)


def clusters(schedules_of_sizes: list[LinearSchedule]) -> set[tuple[int, int]]:
    """Whether the inputs are split, and how many CTAs fetch x together."""
    return {(min(schedule.split_k.ways, 2), schedule.x_multicast) for schedule in schedules_of_sizes}


def stages_of_a_cta(schedule: LinearSchedule) -> int:
    """Of the CTA with the most output tiles."""
    stage_k_tiles = schedule.stage_inputs // schedule.weights.k_tile_inputs
    return schedule.max_tiles * -(-schedule.k_tiles // stage_k_tiles)


MAKERS = {"dense": dense, "int4": int4, "int8": int8}
FORMATS = pytest.mark.parametrize(
    "schedules_of_sizes", [schedules(TINY[f"linear_{name}"], make) for name, make in MAKERS.items()], ids=MAKERS
)


@FORMATS
def test_products_share_x_or_split_the_inputs_in_clusters(schedules_of_sizes: list[LinearSchedule]) -> None:
    assert clusters(schedules_of_sizes) == {(1, 1), (1, 2), (2, 1)}


def test_many_rows_take_several_passes() -> None:
    assert {min(schedule.passes, 2) for schedule in schedules(TINY["linear_int4"], int4)} == {1, 2}


@FORMATS
def test_buffers_are_used_again(schedules_of_sizes: list[LinearSchedule]) -> None:
    """Those of sums, where CTAs fetch their own x, share it or split the inputs, and stages of the pipeline."""
    assert clusters([s for s in schedules_of_sizes if s.max_tiles > SUM_BUFFERS]) == {(1, 1), (1, 2), (2, 1)}
    assert any(stages_of_a_cta(schedule) > schedule.stages for schedule in schedules_of_sizes)


@FORMATS
def test_one_and_several_ctas_of_a_cluster_add_up_what_the_others_send(
    schedules_of_sizes: list[LinearSchedule],
) -> None:
    receivers = {min(s.max_tiles, s.split_k.ways) for s in schedules_of_sizes if s.split_k.ways > 1}
    assert 1 in receivers
    assert max(receivers) > 1


def test_gated_products_share_x() -> None:
    """A gate and what it multiplies are in one CTA, so the inputs are never split; many rows are not gated."""
    found_dense = schedules(TINY["gated_dense"], partial(dense, gated=True))
    found_int4 = schedules(TINY["gated_int4"], partial(int4, gated=True))
    found_int8 = schedules(TINY["gated_int8"], partial(int8, gated=True))
    assert clusters(found_dense) == clusters(found_int4) == clusters(found_int8) == {(1, 1), (1, 2)}
    assert {s.rows for s in found_dense} == {s.rows for s in found_int4} == {s.rows for s in found_int8} == {1, 5}


def test_rows_of_logits_are_aligned_or_not() -> None:
    alignments = {size.vocab * torch.bfloat16.itemsize % 16 == 0 for size in (*TINY["rejection_sample"], *TINY["draw"])}
    assert alignments == {False, True}
