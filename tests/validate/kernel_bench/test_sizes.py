"""Tiny sizes reach every CUDA C++ kernel and its variants, as an H200 would run them, for memory checkers to see."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from ridgeplan.kernels.attention import schedule as attention_plan
from ridgeplan.kernels.linear import dense_schedule as linear_dense_plan
from ridgeplan.kernels.linear import int4_schedule as linear_int4_plan
from ridgeplan.kernels.linear.schedule import Machine, Plan
from ridgeplan.validate.kernel_bench.linear import GROUP
from ridgeplan.validate.kernel_bench.sizes import TINY, LinearSize

PROCESSORS = 132
H200 = Machine(shared_bytes=228 * 1024, clusters=(132, 66, 30, 15))


def test_merges_by_the_last_block_and_by_a_kernel_of_their_own() -> None:
    found = set()
    for size in TINY.attention:
        rows, kv_rows = size.q_heads // size.kv_heads, size.batch * size.kv_heads
        for bits, _ in size.speedups:
            variant = attention_plan.Variant(size.head_dim, bits, True, 8)
            blocks, _ = attention_plan.Occupancy(variant, PROCESSORS, H200.shared_bytes).grid(kv_rows, row_units=1)
            found.add((bits, attention_plan.folds(blocks, kv_rows, rows * size.head_dim)))
    assert found == {(bits, folds) for bits in (0, 4, 8) for folds in (False, True)}


def test_few_and_many_query_rows_have_variants_of_their_own() -> None:
    found = set()
    for size in TINY.verification:
        rows = size.q_heads // size.kv_heads * size.queries
        found |= {(bits, next(most for most in attention_plan.BLOCKS if most >= rows)) for bits in size.bits}
    found |= {(bits, 8) for size in TINY.attention for bits, _ in size.speedups}
    assert found == set(product((0, 4, 8), attention_plan.BLOCKS))


def plans(sizes: tuple[LinearSize, ...], make: Callable[[int, int, int], Plan | None]) -> list[Plan]:
    """Those of the sizes that the CUDA kernels take, `make` being of (rows, outputs, inputs)."""
    made = (make(rows, size.outputs, size.inputs) for size in sizes for rows, _ in size.speedups)
    return [plan for plan in made if plan]


def dense_plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> Plan | None:
    return linear_dense_plan.make_plan(rows, outputs, inputs, True, gated, H200)


def int4_plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> Plan | None:
    return linear_int4_plan.make_plan(rows, outputs, inputs, GROUP, True, gated, H200)


def cuts(found: list[Plan]) -> set[tuple[int, int]]:
    """Whether the inputs are cut, and how many blocks fetch x together."""
    return {(min(plan.cut.splits, 2), plan.shares) for plan in found}


def test_products_share_x_or_cut_the_inputs_in_clusters_and_take_several_passes() -> None:
    dense, int4 = plans(TINY.linear_dense, dense_plan), plans(TINY.linear_int4, int4_plan)
    assert cuts(dense) == cuts(int4) == {(1, 1), (1, 2), (2, 1)}
    assert {min(plan.chunks, 2) for plan in int4} == {1, 2}


def test_gated_products_share_x() -> None:
    """A gate and what it lets through meet in one block, so the inputs are never cut; many rows are not gated."""
    dense = plans(TINY.gated_dense, partial(dense_plan, gated=True))
    int4 = plans(TINY.gated_int4, partial(int4_plan, gated=True))
    assert cuts(dense) == cuts(int4) == {(1, 1), (1, 2)}
    assert {plan.rows for plan in dense} == {plan.rows for plan in int4} == {1, 5}


def test_rows_of_logits_are_aligned_or_not() -> None:
    alignments = {size.vocab * torch.bfloat16.itemsize % 16 == 0 for size in (*TINY.rejection_sample, *TINY.draw)}
    assert alignments == {False, True}
