"""Tiny sizes reach every CUDA C++ kernel and its variants, as an H200 would run them, for memory checkers to see."""

from functools import partial
from itertools import product
from typing import Protocol

import pytest
import torch

from ridgeplan.kernels.attention.cuda import CTAS_PER_SM, AttentionVariant, Occupancy, fuses_reduction
from ridgeplan.kernels.linear.schedule import (
    MAX_INTEGER_ROWS,
    SUM_BUFFERS,
    DeviceLimits,
    LinearSchedule,
    choose_quantized_schedule,
    make_dense_schedule,
)
from ridgeplan.validate.kernel_calls.sizes import LinearSize, bench_sizes

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


class Make(Protocol):
    """Makes the schedule that runs take for a product of `rows` rows."""

    def __call__(self, rows: int, size: LinearSize, gated: bool) -> LinearSchedule | None: ...


def dense(rows: int, size: LinearSize, gated: bool) -> LinearSchedule | None:
    return make_dense_schedule(rows, size.outputs, size.inputs, True, gated, H200)


def quantized(rows: int, size: LinearSize, gated: bool, bits: int) -> LinearSchedule | None:
    return choose_quantized_schedule(rows, size.outputs, size.inputs, size.group, True, gated, H200, bits)


MAKERS: dict[str, Make] = {"dense": dense, "int4": partial(quantized, bits=4), "int8": partial(quantized, bits=8)}
LOW_BITS = ("int4", "int8")
INTEGER_SLOTS = 4  # of a warp's quantized groups on their way between lanes, as in csrc/integer.cuh


def schedules(kind: str, weights: str, *, integer: bool = False) -> list[LinearSchedule]:
    """Of the products of `kind` "linear" or "gated" those that the CUDA kernels compute, as integers or as floats."""
    sizes: tuple[LinearSize, ...] = TINY[f"{kind}_{weights}"]
    by_size = (MAKERS[weights](rows, size, kind == "gated") for size in sizes for rows, _ in size.speedups)
    return [schedule for schedule in by_size if schedule and schedule.integer == integer]


def clusters(schedules_of_sizes: list[LinearSchedule]) -> set[tuple[int, int]]:
    """Whether the inputs are split, and how many CTAs fetch x together."""
    return {(min(schedule.split_k.ways, 2), schedule.x_multicast) for schedule in schedules_of_sizes}


def stages_of_a_cta(schedule: LinearSchedule) -> int:
    """Of the CTA with the most output tiles."""
    stage_k_tiles = schedule.stage_inputs // schedule.weights.k_tile_inputs
    return schedule.max_tiles * -(-schedule.k_tiles // stage_k_tiles)


FORMATS = pytest.mark.parametrize("schedules_of_sizes", [schedules("linear", name) for name in MAKERS], ids=MAKERS)


@FORMATS
def test_products_share_x_or_split_the_inputs_in_clusters(schedules_of_sizes: list[LinearSchedule]) -> None:
    assert clusters(schedules_of_sizes) == {(1, 1), (1, 2), (2, 1)}


def test_many_rows_take_several_passes() -> None:
    assert {min(schedule.passes, 2) for schedule in schedules("linear", "int4")} == {1, 2}


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
    for weights in MAKERS:
        gated = schedules("gated", weights)
        assert clusters(gated) == {(1, 1), (1, 2)}
        assert {schedule.rows for schedule in gated} == {1, 5}


@pytest.mark.parametrize("weights", LOW_BITS)
def test_products_of_integers_have_one_and_several_stages_and_rows(weights: str) -> None:
    of_sizes = schedules("linear", weights, integer=True)
    stages = [-(-schedule.inputs // schedule.stage_inputs) for schedule in of_sizes]
    groups = [count * of.stage_inputs // 128 // of.mma_warps for of, count in zip(of_sizes, stages, strict=True)]
    assert min(stages) == 1 and max(stages) == 7
    assert min(groups) < INTEGER_SLOTS < max(groups)  # slots of groups on their way are used again
    assert {schedule.rows for schedule in of_sizes} == set(range(1, MAX_INTEGER_ROWS + 1))
    assert any(schedule.rows > 1 and count > 1 for schedule, count in zip(of_sizes, stages, strict=True))
    assert {schedule.inputs % schedule.stage_inputs == 0 for schedule in of_sizes} == {False, True}


@pytest.mark.parametrize("weights", LOW_BITS)
def test_products_of_integers_use_buffers_again(weights: str) -> None:
    of_sizes = schedules("linear", weights, integer=True)
    assert any(schedule.max_tiles > SUM_BUFFERS for schedule in of_sizes)
    assert any(stages_of_a_cta(schedule) > schedule.stages for schedule in of_sizes)


@pytest.mark.parametrize("weights", LOW_BITS)
def test_gated_products_of_integers_have_one_and_several_rows(weights: str) -> None:
    assert {schedule.rows for schedule in schedules("gated", weights, integer=True)} == {1, 3}


def test_rows_of_logits_are_aligned_or_not() -> None:
    alignments = {size.vocab * torch.bfloat16.itemsize % 16 == 0 for size in (*TINY["rejection_sample"], *TINY["draw"])}
    assert alignments == {False, True}
