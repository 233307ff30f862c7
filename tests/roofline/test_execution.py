"""What planner, runtime and kernels agree on: each rule against its statement, each constant against its users."""

import numpy as np
import pytest
import sympy

from ridgeplan.roofline import execution
from ridgeplan.roofline.catalog import gguf
from ridgeplan.roofline.catalog.families import INNER_TYPES, executable_architectures, families
from ridgeplan.roofline.catalog.model_shape import TRAITS
from ridgeplan.roofline.plan.plan import KVCache, PlanError, Weights


def test_executable_families_can_be_read_from_configs_and_from_gguf_files():
    assert set(executable_architectures()) < set(families())
    assert set(INNER_TYPES.values()) < set(families())
    assert {trait for family in families().values() for trait in family.traits} <= set(TRAITS)
    assert {stored.family for stored in gguf.ARCHITECTURES.values()} < set(executable_architectures())


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512])
def test_plans_take_the_groups_that_kernels_have(group):
    for axis in (KVCache, Weights):
        if group in execution.QUANTIZATION_GROUPS:
            assert axis(group=group).group == group
        else:
            with pytest.raises(PlanError, match=f"group is {group}"):
                axis(group=group)


@pytest.mark.parametrize(
    "tokens, groups", [(0, 0), (127, 0), (128, 0), (255, 0), (256, 1), (383, 1), (384, 2), (12_800, 99)]
)
def test_all_whole_groups_but_the_last_are_codes(tokens, groups):
    assert execution.quantized_groups(tokens, 128) == groups
    assert tokens < 128 or 128 <= tokens - 128 * groups < 256  # in the buffer


def test_prompts_are_padded_from_8192_tokens_on():
    lengths, padded = np.array([1, 8191, 8192, 8193, 8448, 8449]), [1, 8191, 8192, 8448, 8448, 8704]
    assert execution.padded_prompt(lengths).tolist() == padded
    tokens = sympy.Symbol("tokens")
    assert [execution.padded_prompt(tokens).subs(tokens, int(length)) for length in lengths] == padded


@pytest.mark.parametrize("group", [32, 128])
def test_the_smooth_rule_is_the_mean_of_the_stepwise_one(group):
    """Over whole groups of lengths, each counted halfway through its token."""
    lengths = range(4 * group, 14 * group)
    stepwise = np.mean([group * execution.quantized_groups(length, group) for length in lengths])
    smooth = np.mean([execution.mean_quantized_tokens(length + 0.5, group) for length in lengths])
    assert smooth == pytest.approx(stepwise)
    assert execution.mean_quantized_tokens(group, group) == 0


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "splits"),
    [
        (1, 8, 131072, 33),  # 2 x 132 programs over 8 KV heads
        (1, 8, 500, 2),  # of 256 tokens at least
        (1, 8, 256, 1),
        (1, 8, 257, 2),
        (3, 8, 131072, 11),
        (5, 8, 131072, 7),  # 264 / 40, rounded up
        (64, 8, 131072, 1),
        (1, 8, 1, 1),
    ],
)
def test_splits_fill_the_machine_but_keep_256_tokens_each(batch, heads, tokens, splits):
    assert execution.choose_splits(batch, heads, tokens, 132) == splits


@pytest.mark.parametrize(
    "batch, heads, tokens, splits",
    [
        (1, 8, 131072, 33),
        (5, 8, 131072, 6.6),  # 264 / 40
        (64, 8, 131072, 1),
        (1, 8, 640, 2.5),
    ],
)
def test_splits_are_smooth_in_the_cost_model(batch, heads, tokens, splits):
    assert execution.mean_splits(batch, heads, tokens, 132) == pytest.approx(splits)


@pytest.mark.parametrize(
    "inputs, group, fitting",
    [(576, 128, 64), (4096, 128, 128), (96, 128, 32), (64, 32, 32), (512, 256, 256), (96, 64, 32), (100, 128, None)],
)
def test_a_group_that_does_not_divide_the_inputs_falls_to_64_or_32(inputs, group, fitting):
    assert execution.fitting_group(inputs, group) == fitting


def test_prompts_of_65536_tokens_and_more_use_the_draft_weights_memory():
    assert [execution.uses_draft_swap(context) for context in (65535, 65536, 65537)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "inputs", "counts"),
    [
        ("linear", 8, 28672, 4096, 8),  # this package's kernel
        ("linear", 9, 28672, 4096, 17),  # the library's, as for 17 rows of any product
        ("linear", 16, 4096, 14336, 17),
        ("linear", 40, 4096, 14336, 40),
        ("linear", 9, 8192, 8192, 9),
        ("linear_int4", 9, 28672, 4096, 9),  # quantized weights have no other kernel
        ("head", 9, 128256, 4096, 9),  # a class whose steps are measured
    ],
)
def test_many_channels_go_to_the_library_from_nine_rows_on(kind, rows, outputs, inputs, counts):
    assert execution.rate_rows(kind, rows, outputs, inputs) == counts


def test_library_rows_of_symbols_and_arrays_are_those_of_numbers():
    rows = np.array([1, 8, 9, 16, 17, 300])
    symbol = sympy.Symbol("rows", positive=True)
    expected = [1, 8, 17, 17, 17, 300]
    assert execution.library_rows(rows).tolist() == expected
    assert [execution.library_rows(symbol).subs(symbol, int(row)) for row in rows] == expected


def test_products_of_integers_of_symbols_and_arrays_are_those_of_numbers():
    """Of 4-bit weights: up to 4 rows, 14336 inputs and 28672 elements of x, in whole groups of 128 inputs."""
    rows, symbol = np.array([1, 2, 3, 4, 5]), sympy.Symbol("rows", positive=True)
    for inputs, expected in ((4096, [1, 1, 1, 1, 0]), (14336, [1, 1, 0, 0, 0]), (14464, [0] * 5), (1728, [0] * 5)):
        most, of_symbol = (execution.most_integer_inputs(each, 2 * 14336) for each in (rows, symbol))
        assert execution.takes_integers(inputs, most).tolist() == expected
        formula = execution.takes_integers(inputs, of_symbol)
        assert [formula.subs(symbol, int(row)) for row in rows] == expected
        assert [execution.runs_integers(4, int(row), inputs) for row in rows] == [bool(each) for each in expected]
