"""What single figures show, against counts by hand."""

import csv
import json
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any

import pytest

from ridgeplan.dashboards.figures import PAPER_FIGURES, figures_named, quantspec, specattn, specontext
from ridgeplan.dashboards.figures.paper_figure import FigureError, PaperFigure
from ridgeplan.dashboards.figures.published_table import dumbbells, lines, table_rows
from ridgeplan.dashboards.rows import csv_text
from ridgeplan.planner import resolve
from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Plan, Workload
from ridgeplan.validate.papers.comparison import compare
from ridgeplan.validate.papers.rows import load_tables

LLAMA_2 = "meta-llama/Llama-2-7b-hf"
Rows = Iterable[Mapping[str, Any]]


def one(rows: Rows, **cells: Any) -> Mapping[str, Any]:
    (match,) = (row for row in rows if all(row[name] == value for name, value in cells.items()))
    return match


def test_decode_does_a_flop_per_byte_and_linear_layers_one_more_for_each_sequence() -> None:
    """2 FLOP and 2 bytes for a weight, or for an element of multi-head KV."""
    rows = quantspec.plane_rows("decode", LLAMA_2, "a6000")
    for batch in (1, 16):
        row = one(rows, context=65536, batch=batch)
        assert row["linear"] == pytest.approx(batch, rel=0.02)
        assert row["attention"] == pytest.approx(1, rel=0.02)
    assert row["attention"] < row["aggregate"] < row["linear"]


def test_prefill_of_long_prompts_is_above_the_ridge_and_decode_below() -> None:
    hardware = load_hardware("a6000")
    for phase, bound in (("prefill", True), ("decode", False)):
        rows = quantspec.roofline_rows(phase, LLAMA_2, "a6000", 1)
        row = one(rows, part="aggregate", context=32768)
        assert (row["intensity"] > hardware.ridge_point) == bound
        assert row["flops_per_s"] == (hardware.compute_flops if bound else pytest.approx(
            row["intensity"] * hardware.bandwidth_bytes_per_s))  # fmt: skip


def test_the_ridge_plane_cuts_all_three_surfaces_at_one_height() -> None:
    figure = quantspec.draw_planes(quantspec.plane_rows("prefill", LLAMA_2, "a6000"))
    planes = [trace for trace in figure.data if trace.name == "ridge plane"]
    assert len(planes) == 3
    ridge_point = load_hardware("a6000").ridge_point
    assert all((trace.z == ridge_point).all() for trace in planes)


def test_weights_win_at_short_contexts_and_kv_at_long_ones() -> None:
    """QuantSpec, section 5.2, on Fig 4; both together win everywhere."""
    rows = quantspec.parts_rows("a6000", 4)
    speed = {(row["method"], row["context"]): row["predicted"] for row in rows}
    assert speed["weights only", 4096] > speed["KV only", 4096]
    assert speed["KV only", 131072] > speed["weights only", 131072]
    for context in quantspec.SPEED_CONTEXTS:
        assert speed["both", context] > max(speed["weights only", context], speed["KV only", context])


def test_gamma_rows_are_those_of_one_dataset() -> None:
    rows = quantspec.gamma_rows("PG19, Llama-2", "a6000")
    assert {row["case"].partition(", gamma")[0] for row in rows} == {"PG19, Llama-2"}
    assert [row["gamma"] for row in rows if row["method"] == "QuantSpec"] == [1, 2, 4, 6]


def test_memory_is_that_of_equation_6_and_stays_within_the_gpu() -> None:
    """16 requests of 1024 tokens: 4 x 16 x 32.5 x 1024 x 8 x 128 bytes beside 1.3 x 16.12 GB."""
    rows = specontext.memory_rows("a800-80gb", 16, 2048)
    caches = 4 * 16 * 32.5 * 1024 * 8 * 128
    assert rows[0]["whole_gib"] * 2**30 == pytest.approx(1.3 * (8.03e9 * 2 + 60e6) + caches, rel=1e-3)
    for row in rows:
        assert row["whole_gib"] >= row["adaptive_gib"]
        assert row["adaptive_gib"] <= row["capacity_gib"]
        assert (row["layers_on_host"] > 0) == (row["whole_gib"] > row["capacity_gib"])


def test_throughput_falls_off_a_cliff_that_adaptive_memory_avoids() -> None:
    """By more than 80% from one token to the next (SpeContext, section 6.1)."""
    rows = specontext.throughput_rows("a800-80gb", 16)
    longest = rows[0]["longest_on_gpu"]
    full, adaptive = (
        [one(rows, tokens=tokens, method=method)["tokens_per_s"] for tokens in (longest, longest + 1)]
        for method in (specontext.WHOLE, specontext.ADAPTIVE)
    )
    assert full[1] < 0.2 * full[0]
    assert adaptive[1] == pytest.approx(adaptive[0], rel=0.02)


def test_logits_of_a_query_are_a_64th_of_the_kv_of_qwen3() -> None:
    """32 heads x 2 bytes beside 2 x 8 x 128 x 2 bytes; two queries are Collect-2-Query."""
    rows = [row for row in specattn.logits_rows() if row["method"] == "Qwen/Qwen3-8B"]
    for row in rows:
        assert row["predicted"] == pytest.approx(row["queries"] / 64)
    assert {row["queries"]: row["published"] for row in rows if row["published"] is not None} == {2: 0.05, 12: 0.53}


def test_a_round_is_the_same_but_for_what_is_chosen_and_how() -> None:
    question = {"model": "Qwen/Qwen3-8B", "gpu": "h100-nvl", "context": 110592, "batch": 4, "gamma": 5, "ratio": 0.07}
    rows = specattn.round_rows(**question)
    chosen = {row["method"]: row["milliseconds"] for row in rows if row["part"] == "selection"}
    assert chosen["MagicDec-Stream"] == pytest.approx(0, abs=1e-9)
    assert chosen["SpecExtend"] > chosen["SpecAttn"] > 0  # 6 collected queries, and 2
    logits_ms = 1e3 * 2 * 2 * 4 * 110592 * 32 * 36 / 3.9e12  # of a query: 2 bytes, written and read
    assert chosen["SpecExtend"] == pytest.approx(6 * logits_ms, rel=0.03)
    verified = [row["milliseconds"] for row in rows if row["part"] == "verification"]
    assert verified == pytest.approx([verified[0]] * len(specattn.METHODS))


def test_the_overhead_of_choosing_is_over_the_rest_of_the_round() -> None:
    """Quest on LongBench-v2 stands in both: Fig 3's bars, and the 23% of section 2.3."""
    rows = specattn.round_rows("Qwen/Qwen3-8B", "h100-nvl", 110592, 4, 5, 0.07)
    parts = {row["part"]: row["milliseconds"] for row in rows if row["method"] == "MagicDec-Quest"}
    overhead = one(figures_named(["specattn-fig10b"])[0].data(), case="LongBench-v2, gamma 5", method="MagicDec-Quest")
    assert overhead["predicted"] == pytest.approx(parts["selection"] / (parts["drafting"] + parts["verification"]))
    assert overhead["published"] == 0.23


def test_the_map_of_gamma_and_ratio_agrees_with_the_round() -> None:
    question = {"model": "Qwen/Qwen3-8B", "gpu": "h100-nvl", "context": 110592, "batch": 4}
    rows = specattn.tuning_rows(**question)
    rounds = specattn.round_rows(**question, gamma=5, ratio=0.07)
    expected = one(rounds, method="SpecAttn", part="drafting")["tokens_per_s"]
    assert one(rows, gamma=5, ratio=0.07)["tokens_per_s"] == pytest.approx(expected)
    heat, best = specattn.draw_tuning(rows).data
    assert heat.z.max() == max(row["tokens_per_s"] for row in rows)
    assert heat.z[list(heat.y).index(best.y[0]), best.x[0] - 1] == heat.z.max()


def test_the_legend_of_a_round_sums_to_its_length() -> None:
    rows = specattn.round_rows("Qwen/Qwen3-8B", "h100-nvl", 110592, 4, 5, 0.07)
    figure = specattn.draw_round(rows)
    ends = {note.y: note.x for note in figure.layout.annotations}
    for method in specattn.METHODS:
        bars = sum(trace.x[list(trace.y).index(method)] for trace in figure.data)
        assert ends[method] == pytest.approx(bars)


def test_layers_that_leave_one_by_one_are_never_slower_than_all_at_once() -> None:
    """Equal while none leaves; from then on every layer that stays is one less to copy, until all have left."""
    (figure,) = figures_named(["specontext-placement"])
    rows = figure.data(memory_gb=32)
    assert all(row["adaptive_ms"] == row["static_ms"] for row in rows if row["layers_on_host"] in (0, 32))
    partly = [row for row in rows if 0 < row["layers_on_host"] < 32]
    assert partly and all(row["adaptive_ms"] < row["static_ms"] for row in partly)
    assert [row["layers_on_host"] for row in rows] == sorted(row["layers_on_host"] for row in rows)


# Every figure: its rows, its drawing, its sliders, its CSV.

NAMES = [figure.name for figure in PAPER_FIGURES]


@pytest.mark.parametrize("figure", PAPER_FIGURES, ids=NAMES)
def test_a_figure_draws_its_rows_which_are_plain_values(figure: PaperFigure) -> None:
    rows = figure.data()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert not any(isinstance(value, (list, dict)) for row in rows for value in row.values())
    drawn = figure.draw(rows)
    assert drawn.data
    assert drawn.layout.title.text
    assert len(list(csv.DictReader(StringIO(csv_text(rows))))) == len(rows)


@pytest.mark.parametrize("figure", [one for one in PAPER_FIGURES if one.sliders], ids=lambda one: one.name)
def test_the_last_value_of_every_slider_draws_too(figure: PaperFigure) -> None:
    last = {slider.name: slider.values[-1] for slider in figure.sliders}
    rows = figure.data(**last)
    assert all(row[name] == value for row in rows for name, value in last.items() if row.get(name))
    assert figure.draw(rows).data


def test_every_default_is_one_of_the_values() -> None:
    assert all(slider.default in slider.values for figure in PAPER_FIGURES for slider in figure.sliders)


def test_names_are_unique_and_papers_name_all_their_figures() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert figures_named([]) == PAPER_FIGURES
    assert {figure.paper for figure in figures_named(["dapq", "quantspec-fig4"])} == {"dapq", "quantspec"}
    assert [figure.name for figure in figures_named(["quantspec-fig4"])] == ["quantspec-fig4"]


def test_values_are_read_from_text_and_wrong_ones_are_refused() -> None:
    (figure,) = figures_named(["quantspec-fig4"])
    assert figure.settings(gamma="6") == {"gpu": "a6000", "gamma": 6}
    with pytest.raises(FigureError, match=r"gamma is '7'; allowed: 1, 2, 3"):
        figure.data(gamma="7")
    with pytest.raises(FigureError, match=r"quantspec-fig4 has no 'ratio'; allowed: gpu, gamma"):
        figure.data(ratio=0.1)
    with pytest.raises(FigureError, match=r"unknown figure 'fig4'; allowed: quantspec"):
        figures_named(["fig4"])


def test_absent_values_are_empty_in_csv() -> None:
    assert csv_text([{"a": 1, "b": None}, {"a": "x, y", "c": 2.5}]) == 'a,b,c\n1,,\n"x, y",,2.5\n'


@pytest.mark.parametrize("name", ['=HYPERLINK("http://evil","x")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(1)"])
def test_names_are_no_formulas_of_spreadsheets(name: str) -> None:
    (row,) = csv.DictReader(StringIO(csv_text([{"gpu": name, "change": -0.5}])))
    assert row == {"gpu": f"'{name}", "change": "-0.5"}


# Tables as figures say what `ridgeplan papers` says, and print nothing beside what the paper did not run.

TABLES = (
    ("quantspec", "Table 3", "speedup"), ("quantspec", "Table 3", "peak_gib"), ("specontext", "Table 3",
    "request_tokens_per_s"), ("dapq", "Table 7", "peak_gib"), ("specattn", "Headline", "selection_overhead"),
)  # fmt: skip


@pytest.mark.parametrize(("paper", "table", "metric"), TABLES)
def test_rows_are_the_cells_of_the_papers_command(paper: str, table: str, metric: str) -> None:
    (result,) = (compare(published) for published in load_tables(paper) if published.name == table)
    expected = {
        (cell.case, cell.method): (None if cell.published == "-" else cell.published, cell.predicted)
        for cell in result.cells
        if cell.metric == metric and cell.predicted is not None
    }
    rows = table_rows(paper, table, metric)
    cells = {(row["case"], row["method"]): (row["published"], row["predicted"]) for row in rows}
    assert {key: cells[key] for key in expected} == expected


def test_a_changed_row_keeps_no_printed_value_and_an_unchanged_one_does() -> None:
    """FullKV has no budget, so its row is the paper's whatever the budget."""
    rows = [row for row in table_rows("dapq", "Table 7", "peak_gib", budget=512) if row["case"] == "batch 1"]
    printed = {row["method"]: row["published"] for row in rows}
    assert printed["FullKV"] == 16.87
    assert printed["DapQ"] is None
    larger, paper = (
        next(row["predicted"] for row in table if row["method"] == "DapQ")
        for table in (rows, table_rows("dapq", "Table 7", "peak_gib"))
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
    joined, published, predicted, *methods = figure.data
    assert [method.name for method in methods] == ["x", "y"]  # for the legend
    assert [method.marker.color for method in methods] == list(predicted.marker.color[:2])
    assert list(joined.x) == [2.0, 3.0]
    assert list(published.x) == [2.0, None, None]
    assert list(predicted.x) == [3.0, 4.0, None]
    assert list(predicted.y) == ["a,<br>x", "b,<br>y", "c,<br>x"]
    assert [(note.y, note.text) for note in figure.layout.annotations] == [("c,<br>x", "not printed; predicted: OOM")]
    assert predicted.marker.color[0] == predicted.marker.color[2] != predicted.marker.color[1]


def test_lines_show_predictions_and_rings_where_the_paper_has_values() -> None:
    x, rings, y = lines(ROWS, "size", "title", "x", "y").data
    assert (x.name, list(x.x), list(x.y)) == ("x", [1, 3], [3.0, None])
    assert (rings.marker.symbol, list(rings.y)) == ("circle-open", [2.0, None])
    assert (y.name, list(y.y)) == ("y", [4.0])


def test_memory_is_in_gib_on_both_sides_of_the_capacity() -> None:
    """With no layer on the host both forms are the same cache; an 80 GB GPU has 80 GiB."""
    rows = specontext.memory_rows("a800-80gb", 16, 2048)
    assert {row["capacity_gib"] for row in rows} == {load_hardware("a800-80gb").memory_bytes / 2**30}
    assert {row["layers_on_host"] for row in rows} > {0}
    for row in rows:
        assert (row["adaptive_gib"] == row["whole_gib"]) == (row["layers_on_host"] == 0)


@pytest.mark.parametrize("memory_gb", [24, 32])
def test_layers_leave_from_the_length_at_which_the_cache_exceeds_the_memory(memory_gb: int) -> None:
    """GB of the slider are of 10^9 bytes, as a plan's placement has them."""
    rows = specontext.placement_rows("h200", 4, memory_gb)
    shape, profile = resolve(specontext.PLACEMENT_MODEL, "h200")
    for row in rows:
        workload = Workload(shape.name, "h200", row["tokens"], specontext.NEW_TOKENS, 4)
        resident = peak_bytes(Plan(workload, kv=KVCache(KVFormat.INT8)), shape, Machine.of(profile))
        assert (row["layers_on_host"] > 0) == (resident > memory_gb * 1e9)
