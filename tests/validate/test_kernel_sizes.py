"""Tiny sizes reach every path through the CUDA C++ kernels, as an H200 would run them: memory checkers then see all."""

import torch

from ridgeplan.kernels import attention_cuda, linear_dense_plan, linear_int4_plan
from ridgeplan.kernels.linear_plan import Machine
from ridgeplan.validate.kernel_linear import GROUP
from ridgeplan.validate.kernel_sizes import TINY, LinearSize

PROCESSORS = 132
H200 = Machine(shared_bytes=228 * 1024, clusters=(132, 66, 30, 15))


def test_merges_by_the_last_block_and_by_a_kernel_of_their_own() -> None:
    found = set()
    for size in TINY.attention:
        rows, kv_rows = size.q_heads // size.kv_heads, size.batch * size.kv_heads
        for bits, _ in size.speedups:
            variant = attention_cuda.Variant(size.head_dim, bits, True, 8)
            blocks = attention_cuda._blocks(variant.blocks * PROCESSORS, kv_rows)
            folds = -(-blocks // kv_rows) * rows * size.head_dim <= attention_cuda.FOLDED
            found.add((bits, folds))
    assert found == {(bits, folds) for bits in (0, 4, 8) for folds in (False, True)}


def test_products_share_x_or_cut_the_inputs_in_clusters() -> None:
    def cuts(sizes: tuple[LinearSize, ...], group: int | None) -> set[tuple[int, int]]:
        found = set()
        for size in sizes:
            for rows, _ in size.speedups:
                plan = (
                    linear_dense_plan.make_plan(rows, size.outputs, size.inputs, True, False, H200)
                    if group is None
                    else linear_int4_plan.make_plan(rows, size.outputs, size.inputs, group, True, False, H200)
                )
                found |= {(min(plan.cut.splits, 2), plan.shares)} if plan else set()
        return found

    every = {(1, 1), (1, 2), (2, 1)}
    assert cuts(TINY.linear_dense, None) == cuts(TINY.linear_int4, GROUP) == every


def test_rows_of_logits_are_aligned_or_not() -> None:
    alignments = {size.vocab * torch.bfloat16.itemsize % 16 == 0 for size in (*TINY.judge, *TINY.draw)}
    assert alignments == {False, True}
