"""The suite's sizes are not those of a calibration, and cover what its targets speak of."""

from itertools import product

import pytest

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.validate.calibration.sizes import Suite, suite_for
from ridgeplan.validate.suite.sizes import SuiteSizes, sizes_for

INTEGERS = ("linear_int4", "linear_int8")
ALL = [(suite, device) for suite in ("smoke", "full") for device in ("cpu", "cuda")]


def sizes_of(suite: Suite) -> set[tuple[object, ...]]:
    """Every trial of a suite, as its kernel and sizes."""
    heads = suite.heads
    layers = [
        (size.hidden, size.intermediate, size.q_heads, size.kv_heads, size.head_dim) for size in suite.elementwise
    ]
    return {
        *(("linear", *key) for key in product(suite.linear_shapes, suite.linear_rows)),
        *((kind, *key) for kind in INTEGERS for key in product(suite.linear_shapes, suite.quantized_rows)),
        *(("head", *key) for key in product(suite.head_shapes, suite.head_rows)),
        *(("attention", size) for sizes in suite.decode_sizes().values() for size in sizes),
        *(("elementwise", *key) for key in product(layers, suite.elementwise_rows)),
        *(("sampling", vocab, max(suite.queries)) for vocab in suite.vocabs),
        *(("quantize", *key) for key in product(heads, suite.quantize_tokens)),
        *(("gather", rows) for rows in suite.gather_rows),
        *(("prefill_linear", *key) for key in product(suite.prefill_shapes, suite.prefill_rows)),
        *(("prefill_attention", *key) for key in product(heads, suite.prefill_tokens)),
    }


@pytest.fixture(params=ALL, ids=["-".join(names) for names in ALL])
def suite(request: pytest.FixtureRequest) -> tuple[SuiteSizes, str]:
    name, device = request.param
    return sizes_for(name, device), device


def test_no_kernel_is_validated_at_a_size_that_calibrates_it(suite: tuple[SuiteSizes, str]) -> None:
    sizes, device = suite
    calibrated = sizes_of(sizes.kernels)
    assert len(calibrated) > 20
    for quick in (True, False):
        assert not calibrated & sizes_of(suite_for(device, quick))


def test_no_step_or_workload_has_a_calibrated_length(suite: tuple[SuiteSizes, str]) -> None:
    sizes, device = suite
    calibrated = {tokens for quick in (True, False) for tokens in suite_for(device, quick).tokens}
    steps = {case.context for case in (*sizes.steps, *sizes.generations, *sizes.inflated)}
    assert not calibrated & (steps | {context for context, _ in sizes.regret})


def test_the_full_suite_on_a_gpu_covers_what_the_targets_ask_for() -> None:
    sizes = sizes_for("full", "cuda")
    assert len(sizes.models) >= 3
    assert len(sizes.models) * len(sizes.regret) >= 24
    contexts, batches = ({getattr(case, axis) for case in sizes.steps} for axis in ("context", "batch"))
    assert min(contexts) < 2500 and max(contexts) > 100_000
    assert {1, 16} <= batches
    groups = {shape.q_heads // shape.kv_heads for shape in sizes.models}
    assert groups == {4, 6, 7}
    assert any(shape.qk_norm for shape in sizes.models)


def test_outputs_are_those_of_specontexts_table_3(h200_profile: Profile) -> None:
    sizes = sizes_for("full", "cuda")
    (shape,) = (shape for shape in sizes.models if shape.name == sizes.outputs_shape)
    assert {(case.prompt, case.output) for case in sizes.outputs} == {
        (2048, 16_384), (2048, 32_768), (16_384, 2048), (32_768, 2048),
    }  # fmt: skip
    for case in sizes.outputs:
        plan = case.plan(shape, h200_profile)
        assert not missing_execution(plan, shape)
        assert plan.attention.keeps_generated == (case.preset in ("quest", "clusterkv", "shadowkv"))


def test_every_case_is_a_plan_that_runs(h200_profile: Profile) -> None:
    sizes = sizes_for("full", "cuda")
    for shape in sizes.models:
        for case in sizes.steps:
            plan = case.plan(shape, h200_profile, 256)
            assert not missing_execution(plan, shape)
            assert case.gamma in (None, plan.speculation.gamma)
            assert (plan.workload.context, plan.workload.batch) == (case.context, case.batch)
