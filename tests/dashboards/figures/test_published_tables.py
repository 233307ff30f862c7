"""Tables as figures say what `ridgeplan papers` says, and print nothing beside what the paper did not run."""

import pytest

from ridgeplan.dashboards.figures.published_table import dumbbells, lines, table_rows
from ridgeplan.validate.papers.comparison import compare_all

TABLES = (
    ("quantspec", "Table 3", "speedup"), ("quantspec", "Table 3", "peak_gib"), ("specontext", "Table 3",
    "request_tokens_per_s"), ("dapq", "Table 7", "peak_gib"), ("specattn", "Headline", "selection_overhead"),
)  # fmt: skip


@pytest.mark.parametrize(("paper", "table", "metric"), TABLES)
def test_rows_are_the_cells_of_the_papers_command(paper: str, table: str, metric: str) -> None:
    (result,) = (one for one in compare_all([paper]) if one.name == table)
    expected = {
        (cell.case, cell.method): (None if cell.published == "-" else cell.published, cell.predicted)
        for cell in result.cells
        if cell.metric == metric and cell.predicted is not None
    }
    rows = table_rows(paper, table, metric)
    found = {(row["case"], row["method"]): (row["published"], row["predicted"]) for row in rows}
    assert {key: found[key] for key in expected} == expected


def test_a_changed_row_keeps_no_printed_value_and_an_unchanged_one_does() -> None:
    """FullKV has no budget, so its row is the paper's whatever the budget."""
    rows = [row for row in table_rows("dapq", "Table 7", "peak_gib", budget=512) if row["case"] == "batch 1"]
    printed = {row["method"]: row["published"] for row in rows}
    assert printed["FullKV"] == 16.87
    assert printed["DapQ"] is None
    larger, paper = (
        next(row["predicted"] for row in found if row["method"] == "DapQ")
        for found in (rows, table_rows("dapq", "Table 7", "peak_gib"))
    )
    # 256 more tokens of 4 KiB in each of 32 layers; the workspace holds as many fewer of the layer that is evicted.
    assert larger - paper == pytest.approx(256 * 31 * 4096 / 2**30)


def test_what_does_not_fit_another_gpu_is_out_of_memory() -> None:
    """15 GiB of weights and 30 sequences of 1 GiB do not fit 24 GB."""
    rows = table_rows("dapq", "Table 7", "peak_gib", gpu="rtx4090")
    assert {row["predicted"] for row in rows if row["case"] == "batch 30"} == {"OOM"}


ROWS = [
    {"case": "a", "method": "x", "size": 1, "published": 2.0, "predicted": 3.0},
    {"case": "b", "method": "y", "size": 2, "published": "OOM", "predicted": 4.0},
    {"case": "c", "method": "x", "size": 3, "published": None, "predicted": "OOM"},
]


def test_dumbbells_join_what_both_sides_have() -> None:
    figure = dumbbells(ROWS, "title", "unit")
    joined, published, predicted = figure.data
    assert list(joined.x) == [2.0, 3.0]
    assert list(published.x) == [2.0, None, None]
    assert list(predicted.x) == [3.0, 4.0, None]
    assert list(predicted.y) == ["a,<br>x", "b,<br>y", "c,<br>x"]
    assert predicted.marker.color[0] == predicted.marker.color[2] != predicted.marker.color[1]


def test_lines_show_predictions_and_rings_where_the_paper_has_values() -> None:
    x, rings, y = lines(ROWS, "size", "title", "x", "y").data
    assert (x.name, list(x.x), list(x.y)) == ("x", [1, 3], [3.0, None])
    assert (rings.marker.symbol, list(rings.y)) == ("circle-open", [2.0, None])
    assert (y.name, list(y.y)) == ("y", [4.0])
