"""Targets of published tables, on cells made for the purpose."""

import pytest

from ridgeplan.validate.papers.comparison import Cell, TableResult, Target, above, memory_right, order_right, within


def table(*cells: Cell) -> TableResult:
    return TableResult("specontext", "Table 3", "t", cells)


def cell(case: str, method: str, published: float | str, predicted: float | str | None) -> Cell:
    return Cell(case, method, "request_tokens_per_s", published, predicted)


def test_within_counts_absolute_errors_of_one_method():
    result = table(cell("a", "x", 10.0, 11.4), cell("b", "x", 10.0, 8.4), cell("c", "y", 10.0, 10.0))
    assert within(0.15, ("request_tokens_per_s",), "x")(result) == (1, 2)
    assert within(0.15, ("request_tokens_per_s",))(result) == (2, 3)
    assert within(0.15, ("speedup",))(result) == (0, 0)


@pytest.mark.parametrize(
    ("published", "predicted", "right"),
    [("OOM", "OOM", (1, 1)), ("OOM", 5.0, (0, 1)), (5.0, "OOM", (0, 1)), (5.0, 5.0, (0, 0)), ("-", "OOM", (0, 0))],
)
def test_memory_is_right_where_both_sides_run_out(published, predicted, right):
    assert memory_right(table(cell("a", "x", published, predicted))) == right


def test_order_is_counted_by_case_and_out_of_memory_is_slowest():
    right = cell("a", "x", "OOM", "OOM"), cell("a", "y", 2.0, 7.0), cell("a", "z", 3.0, 9.0)
    wrong = cell("b", "x", 1.0, 5.0), cell("b", "y", 2.0, 4.0)
    unpredicted = cell("b", "z", "-", None)
    assert order_right(table(*right, *wrong, unpredicted)) == (1, 2)


def test_a_lower_bound_must_be_exceeded():
    assert above(table(cell("a", "x", 0.8, 0.9), cell("b", "x", 0.8, 0.7))) == (1, 2)


def test_a_target_says_how_many_it_counts_and_whether_that_is_enough():
    result = table(cell("a", "x", "OOM", "OOM"), cell("b", "x", "OOM", 1.0))
    met, missed = (Target("specontext", "Table 3", "memory right", memory_right, required) for required in (1, 2))
    assert met.told(result) == "target: memory right: 1 of 2, met"
    assert missed.told(result) == "target: memory right: 1 of 2, not met"
