"""Times of operations and passes, worked out by hand on a machine of round numbers."""

from dataclasses import replace

import numpy as np
import pytest
import sympy

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Rates, RowStep, profile_for, shipped_profiles
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import (
    Machine,
    RateTerms,
    attention_kind,
    linear_kind,
    prefill_attention_kind,
    select_rates,
    sparse_attention_kind,
)
from ridgeplan.roofline.passes import Op

HALF = RateTerms(bandwidth_utilization=0.5, compute_utilization=0.25, launch_s=1e-6)


def test_time_is_launch_and_the_larger_of_moving_and_computing(ideal):
    memory_bound = Cost(flops=1e6, read_bytes=2e6, write_bytes=1e6)
    assert ideal.seconds(memory_bound, HALF) == pytest.approx(1e-6 + 3e6 / 0.5e12)
    compute_bound = Cost(flops=1e12, read_bytes=1e6)
    assert ideal.seconds(compute_bound, HALF) == pytest.approx(1e-6 + 1e12 / 0.25e15)


def test_every_launch_of_an_operation_counts(ideal):
    op = Op("x", "elementwise", Cost(read_bytes=1e6), launches=7)
    assert ideal.op_seconds(op, {}) == pytest.approx(7e-6)
    assert ideal.op_seconds(op, {"elementwise": HALF}) == pytest.approx(7 * 3e-6)
    assert ideal.op_seconds(op, {"linear": HALF}) == pytest.approx(7e-6)


@pytest.mark.parametrize(
    "asynchronous, seconds",
    [(1, 10e-6), (0, 10e-6 + 4e-6)],
    ids=["a GPU hides the host's work behind its own", "a CPU does both"],
)
def test_a_pass_of_10_us_on_the_device_and_4_on_the_host(ideal, asynchronous, seconds):
    machine = replace(ideal, asynchronous=asynchronous, pass_dispatch_s=1e-6, layer_dispatch_s=1e-6)
    ops = [Op("x", "elementwise", Cost(read_bytes=1e6), 10)]
    no_gap = {"gap": RateTerms(1.0, 1.0, 0.0)}
    assert machine.pass_seconds(ops, no_gap, layers=3, gap_s=0) == pytest.approx(seconds)
    # 31 us of dispatch are more than the device's 10
    slow = replace(machine, layer_dispatch_s=10e-6).pass_seconds(ops, no_gap, layers=3, gap_s=0)
    assert slow == pytest.approx(31e-6 if asynchronous else 41e-6)


def test_gaps_between_kernels_are_the_devices_time(ideal):
    """2 us of the pass, and 4 of each of 3 layers, beside 10 us of kernels."""
    ops = [Op("x", "elementwise", Cost(read_bytes=1e6), 10)]
    gaps = {"gap": RateTerms(1.0, 1.0, 4e-6)}
    assert ideal.pass_seconds(ops, gaps, layers=3, gap_s=2e-6) == pytest.approx(24e-6)


def test_outputs_and_chains_take_time_of_their_own(ideal):
    """1 us to launch, 3 us of bytes, 100 outputs at 2 ns, a chain of 50 at 4 ns."""
    rates = RateTerms(1.0, 1.0, 1e-6, width_s=2e-9, depth_s=4e-9)
    assert ideal.seconds(Cost(read_bytes=3e6), rates, 100, 50) == pytest.approx(4.4e-6)
    op = Op("x", "linear", Cost(read_bytes=3e6), 7, width=100, depth=50)
    assert ideal.op_seconds(op, {"linear": rates}) == pytest.approx(7 * 4.4e-6)


def test_tiles_overlap_with_reading_and_fill_pipelines(ideal):
    """3 us of bytes beside 4 tiles of 1 us of each SM: 5 us. Half of the 8 tiles that fill an SM: half of 2 us."""
    rates = RateTerms(1.0, 1.0, 1e-6, tile_s=1e-6, fill_s=2e-6)
    assert ideal.seconds(Cost(read_bytes=3e6), rates, tiles=4 * ideal.num_sms) == pytest.approx(7e-6)
    full = ideal.seconds(Cost(), replace(rates, tile_s=0.0), tiles=100 * ideal.num_sms)
    assert full == pytest.approx(3e-6)


@pytest.mark.parametrize(
    "kind, tiles",
    [("linear_int4", 3 * 2), ("attention_int8", 48 * 33), ("elementwise", 0), ("gap", 0)],
    ids=["16 outputs by 4096 inputs", "128 tokens of a KV head", "no weights", "no kernel"],
)
def test_tiles_of_48_by_4200(kind, tiles, ideal):
    op = Op("x", kind, Cost(), 5, width=48, depth=4200)
    assert op.tiles == tiles
    seconds = ideal.op_seconds(op, {kind: RateTerms(1.0, 1.0, 0.0, tile_s=ideal.num_sms * 1e-6)})
    assert seconds == pytest.approx(5e-6 * tiles)


STEPPED = RateTerms.of(
    Rates(
        0.5, 1.0, 1e-6, 0.1,
        steps=(
            RowStep(8, launch_s=2e-6),
            RowStep(16, inverse_utilization=2.0, tile_s=4e-9, fill_s=5e-9, width_s=1e-9, depth_s=3e-9),
        ),
    )
)  # fmt: skip


def test_each_step_of_rows_adds_to_those_below_it():
    assert [STEPPED.at_rows(rows).launch_s for rows in (1, 8, 9, 16, 17)] == pytest.approx([1e-6] * 2 + [3e-6] * 3)
    many = STEPPED.at_rows(17)
    assert (1 / many.bandwidth_utilization, many.width_s, many.depth_s) == pytest.approx((4.0, 1e-9, 3e-9))
    assert (many.tile_s, many.fill_s, many.spread) == pytest.approx((4e-9, 5e-9, 0.1))
    np.testing.assert_allclose(STEPPED.at_rows(np.array([8, 9])).launch_s, [1e-6, 3e-6])


def test_steps_of_symbols_are_those_of_numbers():
    rows = sympy.Symbol("rows", positive=True)
    launch_s = STEPPED.at_rows(rows).launch_s
    assert [float(launch_s.subs(rows, count)) for count in (8, 9)] == pytest.approx([1e-6, 3e-6])


def test_dense_products_of_more_rows_than_the_kernels_take_are_the_librarys(ideal):
    machine = replace(ideal, rates={**ideal.rates, "prefill_linear": HALF})
    few = RateTerms(1.0, 1.0, 0.0)
    assert machine.gemm_rates(16, 1, few) == few
    assert machine.gemm_rates(17, 1, few) == HALF
    assert machine.gemm_rates(17, 0, few) == few  # quantized weights have no other kernel
    # The library is never faster than its own kernels for fewer rows were measured to be.
    slow = RateTerms(0.25, 1.0, 5e-6, spread=0.2, width_s=1e-9)
    assert machine.gemm_rates(17, 1, slow) == RateTerms(0.25, 0.25, 5e-6, spread=0.2, width_s=1e-9)
    rows = machine.gemm_rates(np.array([1, 16, 17, 400]), 1, few)
    np.testing.assert_allclose(rows.launch_s, [0, 0, 1e-6, 1e-6])


def test_rates_are_selected_field_by_field():
    other = RateTerms(0.1, 0.2, 0.3, 0.4)
    assert select_rates(1, other, HALF) == other
    assert select_rates(0, other, HALF) == HALF


@pytest.mark.parametrize(
    "bits, head_dim, kind",
    [
        (0, 128, "attention"),
        (8, 128, "attention_int8"),
        (4, 128, "attention_int4"),
        (0, 64, "attention_d64"),
        (8, 64, "attention_int8_d64"),
        (4, 32, "attention_int4_d64"),
        (0, 96, "attention"),
    ],
)
def test_heads_of_up_to_64_are_classes_of_their_own(bits, head_dim, kind):
    assert attention_kind(bits, head_dim) == kind


def test_prompts_attention_too():
    assert [prefill_attention_kind(head_dim) for head_dim in (64, 80, 128)] == [
        "prefill_attention_d64",
        "prefill_attention",
        "prefill_attention",
    ]


def test_weights_of_each_width_have_a_class():
    assert [linear_kind(bits) for bits in (16, 8, 4)] == ["linear", "linear_int8", "linear_int4"]


def test_a_machine_is_what_its_profile_says(h200_profile):
    profile = replace(h200_profile, host_link_utilization=0.5, layer_dispatch_s=3e-6)
    machine = Machine.of(profile)
    assert machine.host_link_bytes_per_s == 0.5 * 64e9  # PCIe 5.0 x16
    assert (machine.bandwidth_bytes_per_s, machine.compute_flops) == (4.8e12, 989.5e12)
    assert (machine.decode_gemm_rows, machine.fused_swiglu_rows, machine.asynchronous) == (128, 8, 1)
    assert machine.layer_dispatch_s == 3e-6
    host = Machine.of(replace(profile, asynchronous=False))
    assert (host.decode_gemm_rows, host.fused_swiglu_rows, host.asynchronous) == (64, 0, 0)


@pytest.mark.parametrize("first, second", [("h200", "rtx4090"), ("rtx4090", "h200")])
def test_an_unknown_machine_takes_the_rates_of_the_nearest(h200_profile, first, second):
    """An H100 has an H200's peak and 70% of its bandwidth; an RTX 4090 a sixth of its peak and a fifth of that."""
    profiles = [replace(h200_profile, hardware=load_hardware(name), device=name) for name in (first, second)]
    assert profile_for(load_hardware("h100"), tuple(profiles)).transferred_from == "h200"


def test_a_link_that_moves_nothing_launches_nothing(ideal):
    """A copy takes 3 us to launch, and half of 10 GB/s."""
    link = replace(ideal, link_rates={"host_copy": RateTerms(0.5, 1.0, 3e-6)})
    assert link.link_seconds("host_copy", 0) == 0
    assert link.link_seconds("host_copy", 1e6) == pytest.approx(3e-6 + 1e6 / 5e9)
    assert link.link_seconds("host_store", 1e6) == pytest.approx(1e6 / 1e10)  # not calibrated: the whole link


def test_chosen_tokens_of_large_heads_are_priced_as_triton() -> None:
    """The CUDA C++ kernels do not take them: plans of heads of 256 were predicted 14% too fast."""
    profile = profile_for(load_hardware("h200"), shipped_profiles())
    assert sparse_attention_kind(0, 256) == "sparse_attention_wide"
    assert profile.rates("sparse_attention_wide").launch_s > 5 * profile.rates("sparse_attention_full").launch_s
