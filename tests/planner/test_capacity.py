"""What fits is what the memory model says, to the token."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.capacity import (
    HOST_MEMORY_BYTES,
    MAX_BATCH,
    Capacity,
    missing_memory,
    peak_bytes,
    usable_host_bytes,
)
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.execution import DRAFT_SWAP_PROMPT_TOKENS
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Placement, PlanError, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import swaps_draft_weights

SHAPE = load_shape("meta-llama/Llama-3.1-8B")
GPU = Device(memory_bytes=24 * 10**9, element_bytes=2, num_sms=132)


def plan(name="autoregressive", context=131072, batch=2):
    return preset(name, Workload(SHAPE.name, "h200", context, 256, batch))


def resized(plan, **changes):
    return replace(plan, workload=replace(plan.workload, **changes))


def test_a_plan_that_fits_misses_nothing():
    assert missing_memory(plan(context=4096), SHAPE, GPU) is None


def test_a_plan_fits_up_to_the_last_byte():
    resized_plan = plan(context=4096)
    needed = peak_bytes(resized_plan, SHAPE, GPU)
    assert missing_memory(resized_plan, SHAPE, replace(GPU, memory_bytes=needed)) is None
    assert missing_memory(resized_plan, SHAPE, replace(GPU, memory_bytes=needed - 1))


def test_the_peak_of_plain_decoding_by_hand():
    """Weights; a bf16 cache of 2 x (4096 + 256 + 1) tokens; a prompt's buffers and the MLP of its one chunk."""
    kv = 2 * 4353 * 131_072
    workspace = 4096 * 2 * (4096 + 4096 + 2048) + 4096 * 3 * (4096 + 14336) * 2
    assert peak_bytes(plan(context=4096), SHAPE, GPU) == 2 * 8_030_261_248 + kv + workspace


def test_prompts_use_the_draft_weights_memory_where_there_are_any_and_prompts_are_long():
    long, short = DRAFT_SWAP_PROMPT_TOKENS, DRAFT_SWAP_PROMPT_TOKENS - 1
    assert swaps_draft_weights(plan("quantspec", long))
    assert not swaps_draft_weights(plan("quantspec", short))
    assert not swaps_draft_weights(plan("quantspec-kv", long))


def test_the_largest_batch_is_that_of_plans():
    assert Workload("m", "h200", 1, batch=MAX_BATCH).batch == 4096
    with pytest.raises(PlanError, match="batch is 4097"):
        Workload("m", "h200", 1, batch=MAX_BATCH + 1)


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "int8"])
def test_the_largest_context_and_batch_are_named(name):
    resized_plan = plan(name)
    message = missing_memory(resized_plan, SHAPE, GPU)
    assert re.match(r"the plan needs \d+\.\d GB and 24\.0 GB may be used; allowed: ", message)
    context = int(re.search(r"context up to (\d+) with batch 2", message).group(1))
    assert peak_bytes(resized(resized_plan, context=context), SHAPE, GPU) <= GPU.memory_bytes
    assert peak_bytes(resized(resized_plan, context=context + 1), SHAPE, GPU) > GPU.memory_bytes
    batch = re.search(r"batch (\d+) with context 128k", message)
    single_sequence = resized(resized_plan, batch=1)
    assert (batch is None) == (peak_bytes(single_sequence, SHAPE, GPU) > GPU.memory_bytes)
    assert batch is None or batch.group(1) == "1"


def test_largest_sizes_keep_to_their_limits():
    """A sliding window may leave no room for any prompt."""
    plans = [plan("int8"), plan("int8"), plan("autoregressive")]
    limits = np.array([0, 100, 100])
    assert list(Capacity(plans, SHAPE, GPU).largest_contexts(limits)) == [0, 100, 100]
    nothing = replace(GPU, memory_bytes=10**9)
    assert list(Capacity(plans, SHAPE, nothing).largest_contexts(limits)) == [0, 0, 0]
    assert list(Capacity(plans, SHAPE, nothing).largest_batches()) == [0, 0, 0]


def test_weights_alone_can_be_too_much():
    message = missing_memory(plan(), SHAPE, replace(GPU, memory_bytes=10**9))
    assert message.endswith("no context fits with these formats")


def test_a_smaller_context_and_batch_together_are_named():
    resized_plan = plan(context=2**23, batch=4096)
    message = missing_memory(resized_plan, SHAPE, GPU)
    context = int(re.search(r"; allowed: context up to (\d+) with batch 1$", message).group(1))
    assert peak_bytes(resized(resized_plan, context=context, batch=1), SHAPE, GPU) <= GPU.memory_bytes
    assert peak_bytes(resized(resized_plan, context=context + 1, batch=1), SHAPE, GPU) > GPU.memory_bytes


def test_models_are_looked_up_by_name():
    assert missing_memory(plan(), "meta-llama/Llama-3.1-8B", GPU) == missing_memory(plan(), SHAPE, GPU)


@pytest.mark.parametrize("new_tokens", [256, 4096])
def test_a_context_whose_prompts_use_the_draft_weights_memory_may_fit_where_a_shorter_one_does_not(new_tokens):
    resized_plan = resized(plan("quantspec", context=DRAFT_SWAP_PROMPT_TOKENS - 1, batch=1), new_tokens=new_tokens)
    taken_bytes = peak_bytes(resized(resized_plan, context=DRAFT_SWAP_PROMPT_TOKENS), SHAPE, GPU)
    smaller = replace(GPU, memory_bytes=int(taken_bytes + 1e8))
    message = missing_memory(resized_plan, SHAPE, smaller)
    first, context = map(int, re.search(r"context from (\d+) to (\d+) with batch 1", message).groups())
    assert first == DRAFT_SWAP_PROMPT_TOKENS <= context
    assert peak_bytes(resized(resized_plan, context=context), SHAPE, GPU) <= smaller.memory_bytes
    assert peak_bytes(resized(resized_plan, context=context + 1), SHAPE, GPU) > smaller.memory_bytes


LARGE = replace(GPU, memory_bytes=80 * 10**9)
OFFLOADING = replace(plan(), placement=Placement(True, 131072, memory_bytes=24_000_000_000))


def test_what_lies_on_the_host_must_fit_there():
    """34 GB of KV and 16 GB of weights: with 24 GB of the GPU most of the KV is on the host."""
    on_host = Capacity([OFFLOADING], SHAPE, LARGE)
    assert on_host.fits().tolist() == [True]
    assert replace(on_host, host_limit_bytes=40e9).fits().tolist() == [True]
    assert replace(on_host, host_limit_bytes=1e9).fits().tolist() == [False]
    assert replace(on_host, host_limit_bytes=1e9).largest_batches().tolist() == [0]


def test_the_smallest_plan_is_one_that_fits_the_host():
    both = Capacity([OFFLOADING, plan("int8")], SHAPE, LARGE)
    assert both.peaks()[0] < both.peaks()[1]
    assert both.smallest() == 0
    assert replace(both, host_limit_bytes=1e9).smallest() == 1


def test_this_machines_memory_is_used_up_to_the_utilization():
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_host_bytes(None, 0.5, this_machine=True) == 0.5 * physical
    assert usable_host_bytes(None, 0.5, this_machine=False) == HOST_MEMORY_BYTES
    assert usable_host_bytes(64e9, 0.5, this_machine=True) == 64e9
    assert usable_host_bytes(0, 0.5, this_machine=True) == 0
