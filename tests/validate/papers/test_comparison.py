"""The papers' tables: counts and readings by hand from their text, targets, and an error budget for each table."""

from collections import Counter

import pytest

from ridgeplan.validate.papers.comparison import (
    Cell,
    TableResult,
    Target,
    above,
    compare_all,
    memory_right,
    order_right,
    targets_of,
    within,
)
from ridgeplan.validate.papers.rows import PAPERS

# Cells as counted by hand in the papers: all, out of memory, printed as "-" or lost with a figure, not predictable.
COUNTS = {
    # 8 datasets x 3 methods x (speed-up, memory); the two baselines run out of memory at 128k, so have no speed-up.
    ("quantspec", "Table 3"): (48, 2, 2, 0),
    ("quantspec", "Table 4"): (10, 0, 0, 0),  # 3 kernels x 2 contexts, and a ratio for two of the kernels
    ("quantspec", "Table 6"): (40, 0, 0, 0),  # 4 datasets x (3 + 3 + 4) gammas
    ("quantspec", "Fig 4"): (9, 0, 9, 0),  # 3 variants at 3 contexts; its numbers are lost
    # 8 workloads x 5 engines, eager out of memory in 4, ShadowKV missing in 4; 14 + 10 ratios other than 1.00.
    ("specontext", "Table 3"): (64, 4, 4, 4),
    ("specontext", "Claims"): (9, 0, 0, 5),
    ("specontext", "Cliff"): (2, 0, 0, 0),
    ("specattn", "Headline"): (19, 0, 0, 7),
    ("specattn", "Fig 11"): (5, 0, 4, 0),
    ("specattn", "Fig 6"): (4, 0, 0, 0),
    ("specattn", "Table 2"): (48, 0, 0, 0),  # 4 models x 4 designs x 3 datasets
    ("dapq", "Table 3"): (42, 4, 0, 0),  # 7 methods x 6 batches; FullKV and LaCache run out of memory at 40 and 50
    ("dapq", "Table 4"): (35, 0, 0, 0),  # 7 methods x 5 contexts
    ("dapq", "Table 7"): (42, 4, 0, 0),
}

# Budgets of absolute error: (median, worst), with the reason of the largest errors. One grows only with
# its reason beside it.
BUDGETS = {
    # Sparse drafts: the paper's plain decoding takes 32 ms at 8k where its own verification takes 25; so speed-ups over
    # it are higher than throughputs (Table 6) bear out, the more the longer the context.
    # QuantSpec's own 4-bit products reach 39% of the bandwidth, by its Table 6 (engines.toml).
    ("quantspec", "Table 3"): (0.07, 0.45),
    # INT4 and INT8: the paper's kernels reach two thirds of the bandwidth, both alike, so unpacking is not what binds
    # them. Attention in 16 bits reaches 88% here and 90% there. Ratios have the errors of both sides.
    ("quantspec", "Table 4"): (0.25, 0.34),
    # By the differences between its gammas a draft of QuantSpec takes 16 to 18 ms; with this package's products,
    # whose programs share the inputs, it takes less, and gamma 6 gains more than in the paper.
    ("quantspec", "Table 6"): (0.06, 0.30),
    # SpeContext's rows of 32 requests: its gathers of selected KV are priced as streams.
    ("specontext", "Table 3"): (0.36, 2.12),
    ("specontext", "Claims"): (0.05, 0.5),  # "twice as long": bytes give 1.0 where launches of the host decide
    ("specontext", "Cliff"): (0.23, 0.23),  # the paper's 80% is a lower bound
    # Top-k is not priced, which the overheads of SpecExtend and SpecAttn show: at most half of those printed.
    # Gathers have the rate of torch's index_select, which is slower than a fused kernel's.
    # Sets of the last verification were accepted less at 120k tokens, measured on a small model, than the paper's are.
    ("specattn", "Headline"): (0.46, 0.81),  # of gpt-oss, the median row, the router is priced since
    # The paper's plain step takes 36.9 ms (section 2.2), 28 ms by what vLLM reaches on an H200; and its acceptance is
    # not given, the planner's is lower.
    ("specattn", "Fig 11"): (0.39, 0.39),
    ("specattn", "Fig 6"): (0.63, 0.67),  # bytes alone: scattered writes by the attention kernel take 2 to 3 times that
    # The planner's acceptances are lower, so its best gamma is too: all rows measured at 120k are of small models.
    ("specattn", "Table 2"): (0.23, 0.75),
    # A sequence costs 16 ms a step whatever its cache holds, which no bytes of the model explain. Prefill, right in
    # Table 4, is the rest of these requests: the faster it is, the more they show of those 16 ms.
    ("dapq", "Table 3"): (1.65, 3.06),
    ("dapq", "Table 4"): (0.04, 0.12),
    ("dapq", "Table 7"): (0.055, 0.08),
}
UNMET = {
    ("quantspec", "Table 4", "attention within 12%"),  # 16 bits are; the paper's kernels for codes are slower
}


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], TableResult]:
    return {(result.paper, result.name): result for result in compare_all()}


def cells_of(result: TableResult, **text: str) -> list[Cell]:
    return [cell for cell in result.cells if all(getattr(cell, name) == value for name, value in text.items())]


def test_every_cell_is_there(results):
    def counted(result: TableResult) -> tuple[int, int, int, int]:
        words = Counter(cell.published for cell in result.cells if isinstance(cell.published, str))
        return len(result.cells), words["OOM"], words["-"], len(result.unpredicted)

    assert {name: counted(result) for name, result in results.items()} == COUNTS


@pytest.mark.parametrize("table", BUDGETS, ids=" ".join)
def test_errors_stay_within_the_budget(results, table):
    median, worst = BUDGETS[table]
    assert results[table].median_error <= median
    assert max(map(abs, results[table].errors)) <= worst


def test_every_table_with_numbers_on_both_sides_has_a_budget(results):
    assert {name for name, result in results.items() if result.errors} == set(BUDGETS)


def test_targets_are_met(results):
    missed = {
        (paper, name, target.text)
        for (paper, name), result in results.items()
        for target in targets_of(result)
        if not target.result(result)["met"]
    }
    assert missed <= UNMET


def test_out_of_memory_cells_are_predicted_as_such_and_no_others(results):
    wrong = [cell for result in results.values() for cell in result.cells if cell.memory_right is False]
    assert wrong == []


def test_each_row_that_cannot_be_predicted_says_why(results):
    assert all(cell.flag for result in results.values() for cell in result.unpredicted)


def test_table_4_at_64k_is_read_as_its_ratios_say(results):
    """QuantSpec-1: 1.08 ms x 1.44 and 0.54 ms x 2.88 are 1.555 ms, not the 3.07 ms printed."""
    (flash,) = cells_of(results["quantspec", "Table 4"], case="64k", method="FlashAttention, FP16")
    assert flash.published == pytest.approx(1.08 * 1.44, rel=0.005) == pytest.approx(0.54 * 2.88, rel=0.005)
    assert "3.07" in flash.flag


def test_sparse_baselines_of_table_6_are_within_15_percent(results):
    """Plain kernels at published acceptance: nothing but bytes and gpt-fast's launches is left to explain."""
    cells = [cell for cell in results["quantspec", "Table 6"].cells if cell.method != "QuantSpec"]
    assert len(cells) == 24
    assert max(abs(cell.error) for cell in cells) <= 0.15


def test_quantspecs_memory_below_its_parts_is_flagged_not_matched(results):
    """At 4k it prints 16.26 GiB; 13.5 GB of weights, 3.4 GB of 4-bit ones and 1.1 GB of codes are 16.7 GiB."""
    (cell,) = cells_of(results["quantspec", "Table 3"], case="PG19 4k, Llama-2", method="QuantSpec", metric="peak_gib")
    assert cell.published < (13.5e9 + 3.4e9 + 1.1e9) / 2**30
    assert "exceeds what bytes allow" in cell.flag


def test_weights_matter_at_short_contexts_and_codes_at_long_ones(results):
    """QuantSpec, section 5.3, on the lost Fig 4."""
    speedup = {(cell.case, cell.method): cell.predicted for cell in results["quantspec", "Fig 4"].cells}
    assert speedup["4k", "weights only"] > speedup["4k", "KV only"]
    assert speedup["128k", "KV only"] > speedup["128k", "weights only"]
    assert all(speedup[context, "both"] > speedup[context, "weights only"] for context in ("4k", "32k", "128k"))


def test_kv_sizes_are_exact(results):
    """Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token; Qwen3-8B: 36 layers, 144 KiB."""
    sizes = [cell for result in results.values() for cell in result.cells if cell.metric == "kv_gib"]
    assert sorted(cell.predicted for cell in sizes) == [2, 4, 72] == sorted(cell.published for cell in sizes)


def test_papers_can_be_chosen(results):
    assert {result.paper for result in compare_all(["quantspec"])} == {"quantspec"}
    assert {paper for paper, _ in results} == set(PAPERS)  # without a choice


# Targets of published tables, on cells made for the purpose.


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
    assert met.describe(result) == "target: memory right: 1 of 2, met"
    assert missed.describe(result) == "target: memory right: 1 of 2, not met"
