"""Rates of a round's products: kernels for few rows up to what the runtime gives them, then the library's."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.kernels.linear import dense_schedule, int4_schedule
from ridgeplan.kernels.linear.schedule import DeviceLimits
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Workload
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Rates
from ridgeplan.roofline.execution import CUDA_FUSED_SWIGLU_ROWS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.passes import decode_pass
from ridgeplan.roofline.speculative_round import draft_rates, target_rates, target_terms

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))


@pytest.fixture(scope="module")
def machine(h200_profile):
    classes = {**h200_profile.classes, "prefill_linear": Rates(0.5, 0.8, 9e-6, 0.05)}
    return Machine.of(replace(h200_profile, classes=classes))


SHAPE = load_shape("Llama-3.1-8B")


def lowered(name, machine, batch):
    """Strategy and rates of a preset."""
    plan = preset(name, Workload("Llama-3.1-8B", "h200", 4096, batch=batch))
    return strategy_of(plan, SHAPE, machine, 0.9), rates_of(plan, SHAPE, machine)


def test_products_of_gate_and_up_fit_the_kernels_up_to_the_priced_rows():
    shape = load_shape("Llama-3.1-8B")
    outputs, inputs = 2 * shape.intermediate, shape.hidden
    for rows in range(1, CUDA_FUSED_SWIGLU_ROWS + 1):
        assert dense_schedule.make_schedule(rows, outputs, inputs, True, True, H200)
        assert int4_schedule.make_schedule(rows, outputs, inputs, 128, True, True, H200)
    assert dense_schedule.make_schedule(CUDA_FUSED_SWIGLU_ROWS + 1, outputs, inputs, True, True, H200) is None
    assert int4_schedule.make_schedule(CUDA_FUSED_SWIGLU_ROWS + 1, outputs, inputs, 128, True, True, H200) is None


@pytest.mark.parametrize("batch, fused", [(8, 1), (9, 0)])
def test_products_of_few_rows_on_a_device_activate_what_they_write(machine, batch, fused):
    shape = load_shape("Llama-3.1-8B")
    terms = target_terms(shape, machine, lowered("autoregressive", machine, batch)[0], 4096)
    found = {op.name: op for op in decode_pass(shape, terms)}
    assert found["mlp swiglu"].launches == (1 - fused) * shape.layers
    assert found["mlp gate + up"].cost.write_bytes == batch * (2 - fused) * shape.intermediate * 2
    host = replace(machine, fused_swiglu_rows=0)
    assert target_terms(shape, host, lowered("autoregressive", host, 1)[0], 4096).fused_swiglu == 0


@pytest.mark.parametrize("batch, many", [(3, False), (4, True)])
def test_a_verification_of_many_rows_runs_the_librarys_products(machine, batch, many):
    strategy, rates = lowered("quantspec", machine, batch)
    rates = target_rates(machine, replace(strategy, gamma=4), rates)  # 15 or 20 rows
    for kind in ("linear", "head"):
        assert rates[kind] == machine.rates["prefill_linear" if many else kind]


def test_drafts_have_a_row_a_sequence_and_4_bit_products_no_other_kernel(machine):
    dense, narrow = (draft_rates(machine, *lowered(name, machine, 17)) for name in ("quantspec-kv", "quantspec"))
    assert dense["linear"] == dense["head"] == machine.rates["prefill_linear"]
    assert narrow["linear"] == narrow["head"] == machine.rates["linear_int4"]


def test_a_batch_of_plans_at_once(machine):
    gammas = np.array([1.0, 15.0, 16.0])
    strategy, rates = lowered("quantspec", machine, 1)
    linear = target_rates(machine, replace(strategy, gamma=gammas), rates)["linear"]
    few, many = (machine.rates[kind].launch_s for kind in ("linear", "prefill_linear"))
    np.testing.assert_allclose(linear.launch_s, [few, few, many])
