"""What single figures show, against counts by hand."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ridgeplan.dashboards.figures import figures_named, quantspec, specattn, specontext
from ridgeplan.roofline.catalog.hardware import load_hardware

LLAMA_2 = "meta-llama/Llama-2-7b-hf"
Rows = Iterable[Mapping[str, Any]]


def one(rows: Rows, **wanted: Any) -> Mapping[str, Any]:
    (found,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return found


def test_decode_does_a_flop_per_byte_and_linear_layers_one_more_for_each_sequence() -> None:
    """2 FLOP and 2 bytes for a weight, or for an element of multi-head KV."""
    rows = quantspec.decode_rows(LLAMA_2, "a6000")
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
    figure = quantspec.draw_planes(quantspec.prefill_rows(LLAMA_2, "a6000"))
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
    whole, adaptive = (
        [one(rows, tokens=tokens, method=method)["tokens_per_s"] for tokens in (longest, longest + 1)]
        for method in (specontext.WHOLE, specontext.ADAPTIVE)
    )
    assert whole[1] < 0.2 * whole[0]
    assert adaptive[1] == pytest.approx(adaptive[0], rel=0.02)


def test_logits_of_a_query_are_a_64th_of_the_kv_of_qwen3() -> None:
    """32 heads x 2 bytes beside 2 x 8 x 128 x 2 bytes; two queries are Collect-2-Query."""
    rows = [row for row in specattn.logits_rows() if row["method"] == "Qwen/Qwen3-8B"]
    for row in rows:
        assert row["predicted"] == pytest.approx(row["queries"] / 64)
    assert {row["queries"]: row["published"] for row in rows if row["published"] is not None} == {2: 0.05, 12: 0.53}


def test_a_round_is_the_same_but_for_what_is_chosen_and_how() -> None:
    asked = {"model": "Qwen/Qwen3-8B", "gpu": "h100-nvl", "context": 110592, "batch": 4, "gamma": 5, "ratio": 0.07}
    rows = specattn.round_rows(**asked)
    chosen = {row["method"]: row["milliseconds"] for row in rows if row["part"] == "selection"}
    assert chosen["MagicDec-Stream"] == pytest.approx(0, abs=1e-9)
    assert chosen["SpecExtend"] > chosen["SpecAttn"] > 0  # 6 collected queries, and 2
    verified = [row["milliseconds"] for row in rows if row["part"] == "verification"]
    assert verified == pytest.approx([verified[0]] * len(specattn.METHODS))


def test_the_overhead_of_choosing_is_over_the_rest_of_the_round() -> None:
    """Quest on LongBench-v2 stands in both: Fig 3's bars, and the 23% of section 2.3."""
    rows = specattn.round_rows("Qwen/Qwen3-8B", "h100-nvl", 110592, 4, 5, 0.07)
    parts = {row["part"]: row["milliseconds"] for row in rows if row["method"] == "MagicDec-Quest"}
    overhead = one(specattn.overhead_rows("h100-nvl"), case="LongBench-v2, gamma 5", method="MagicDec-Quest")
    assert overhead["predicted"] == pytest.approx(parts["selection"] / (parts["drafting"] + parts["verification"]))
    assert overhead["published"] == 0.23


def test_the_map_of_gamma_and_ratio_agrees_with_the_round() -> None:
    asked = {"model": "Qwen/Qwen3-8B", "gpu": "h100-nvl", "context": 110592, "batch": 4}
    rows = specattn.tuning_rows(**asked)
    rounds = specattn.round_rows(**asked, gamma=5, ratio=0.07)
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


def test_placements_are_drawn_as_lines_and_measured_ones_as_points() -> None:
    (figure,) = figures_named(["specontext-placement"])
    measured = {"tokens": 32768, "source": "measured", "layers_on_host": 3, "adaptive_ms": 21.5, "static_ms": 95.0}
    rows = figure.data()
    assert len(figure.draw(rows).data) == 3
    adaptive, points, static, others, _ = figure.draw([*rows, measured]).data
    assert [list(one.y) for one in (points, others)] == [[21.5], [95.0]]
    assert [one.mode for one in (adaptive, points, static, others)] == ["lines", "markers"] * 2


def test_layers_that_leave_one_by_one_are_never_slower_than_all_at_once() -> None:
    """Equal while none leaves; from then on every layer that stays is one less to copy, until all have left."""
    (figure,) = figures_named(["specontext-placement"])
    rows = figure.data(memory_gb=32)
    assert all(row["adaptive_ms"] == row["static_ms"] for row in rows if row["layers_on_host"] in (0, 32))
    partly = [row for row in rows if 0 < row["layers_on_host"] < 32]
    assert partly and all(row["adaptive_ms"] < row["static_ms"] for row in partly)
    assert [row["layers_on_host"] for row in rows] == sorted(row["layers_on_host"] for row in rows)
