"""Charts over contexts, batches, gammas and acceptances hold what the planner computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeplan.dashboards import charts, html_pages
from ridgeplan.dashboards.charts import results, rooflines, rounds
from ridgeplan.dashboards.charts.capacity import dollars_per_million, no_fit_runs
from ridgeplan.dashboards.charts.memory import about, staircase_text
from ridgeplan.dashboards.charts.plans import crossing_text, fitting_times
from ridgeplan.dashboards.charts.rooflines import APART, LABELS, labelled
from ridgeplan.dashboards.charts.rounds import break_even
from ridgeplan.dashboards.charts.traffic import LATENCIES
from ridgeplan.planner import Recommendation, Traffic, preset, recommend, serving_capacity
from ridgeplan.planner.queries.cost import LatencyLimits
from ridgeplan.planner.queries.curves import (
    Crossing,
    OffloadStep,
    memory_over_contexts,
    offload_staircase,
    over_batches,
    over_contexts,
    speculation_map,
)
from ridgeplan.planner.queries.maps import PlanMap, plan_map
from ridgeplan.planner.question import Question, ask
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.passes import category
from ridgeplan.roofline.plan.presets import short_name
from ridgeplan.validate.papers.quantspec_ridge_plane import decode_plane

MODEL = "meta-llama/Llama-3.1-8B"
CONTEXTS, BATCHES = (1024, 4096, 16_384, 65_536), (1, 4, 16, 64)


@pytest.fixture(scope="module")
def question(profile: Profile) -> Question:
    return ask(MODEL, "h200", 65_536, profile=profile, memory_limit="40GB", offload=False)


@pytest.fixture(scope="module")
def plans_by_cell(question: Question) -> PlanMap:
    return plan_map(question, CONTEXTS, BATCHES)


def named(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data if trace.name}


def test_every_cell_is_its_plan_s_time_or_hatched(plans_by_cell: PlanMap) -> None:
    figure = charts.capacity_map(plans_by_cell, (65_536, 4))
    (heat,) = (trace for trace in figure.data if trace.type == "heatmap")
    assert heat.z.shape == (len(BATCHES), len(CONTEXTS))
    assert (np.isnan(heat.z) == ~plans_by_cell.fits.T).all()
    assert 10 ** heat.z[0][0] == pytest.approx(1e3 * plans_by_cell.tpot_s[0, 0])
    hatched = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(trace.x[0] for trace in hatched) == pytest.approx(
        2 * (~plans_by_cell.fits).sum()
    )  # cells are 2 powers wide
    assert all(trace.marker.pattern.shape == "/" for trace in hatched)
    ring = named(figure)["your question"]
    assert (ring.x[0], ring.y[0]) == (16, 2)


def test_hatching_starts_where_nothing_fits(plans_by_cell: PlanMap) -> None:
    """At 65,536 tokens x 64 the codes alone take 280 GB; 1024 tokens x 16 take 1 GB."""
    runs = {row: (base, length) for base, length, row in no_fit_runs(plans_by_cell, np.log2(CONTEXTS))}
    assert 0 not in runs
    base, length = runs[3]
    assert base + length == 17  # the last cell is around 2^16
    assert plans_by_cell.fits[: round((base - 9) / 2), 3].all()


def test_limits_and_prices_are_contours(plans_by_cell: PlanMap) -> None:
    figure = charts.capacity_map(plans_by_cell, (65_536, 4), 3.6, 5.0, 2000.0)
    limits = {name: trace.contours.value for name, trace in named(figure).items() if trace.type == "contour"}
    assert limits == {"5 ms per token": 5.0, "2 s to the first token": 2000.0}
    prices = [note.text for note in figure.layout.annotations]
    assert prices
    assert all(text.endswith("per million tokens") for text in prices)
    assert not charts.capacity_map(plans_by_cell, (65_536, 4)).layout.annotations


def test_a_limit_on_the_first_token_is_drawn_where_one_request_reaches_it(plans_by_cell: PlanMap) -> None:
    figure = charts.capacity_map(plans_by_cell, (65_536, 4), ttft_limit_ms=2000.0)
    drawn = named(figure)["2 s to the first token"].z
    request_ms = 1e3 * plans_by_cell.ttft_s / np.array(BATCHES)
    np.testing.assert_allclose(drawn, np.where(plans_by_cell.fits, request_ms, np.nan).T)


def test_dollars_per_million_tokens(plans_by_cell: PlanMap) -> None:
    """At $3.60 an hour, 1e-3 dollars a second: a batch takes its prompts, then 1024 steps, for 1024 tokens each."""
    seconds = plans_by_cell.ttft_s[0] + 1024 * plans_by_cell.tpot_s[0]
    for column, batch in enumerate(plans_by_cell.batches):
        tokens = 1024 * batch
        assert dollars_per_million(plans_by_cell, 3.6)[0, column] == pytest.approx(
            1e-3 * seconds[column] / tokens * 1e6
        )


def test_milliseconds_beside_the_colours_are_written_out(plans_by_cell: PlanMap) -> None:
    slow = replace(
        plans_by_cell, tpot_s=np.geomspace(1e-3, 30.0, plans_by_cell.tpot_s.size).reshape(plans_by_cell.tpot_s.shape)
    )
    heat = charts.capacity_map(replace(slow, fits=np.ones_like(plans_by_cell.fits)), (65_536, 4)).data[0]
    assert list(heat.colorbar.ticktext) == ["1", "10", "100", "1,000", "10,000"]


def test_curves_end_where_memory_does_and_lie_in_their_bands(question: Question) -> None:
    names = {"plain": "autoregressive", "drafting": "quantspec"}
    curves = {name: over_contexts(preset(of, question.workload), question, CONTEXTS) for name, of in names.items()}
    limit = (curves["plain"][2].best.peak_memory_bytes + curves["plain"][3].best.peak_memory_bytes) / 2
    figure = charts.times_over_context(CONTEXTS, curves, {"plain": limit, "drafting": 1e12}, 65_536)
    lines = named(figure)
    assert [np.isnan(value) for value in lines["plain"].y] == [False, False, False, True]
    assert list(lines["drafting"].y) == pytest.approx([value.best.tpot_ms for value in curves["drafting"]])
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    low, best, high = fitting_times(curves["plain"], limit)
    assert list(bands[0].y) == pytest.approx([*high[:3], *low[:3][::-1]])
    assert (low[:3] < best[:3]).all()
    assert (best[:3] < high[:3]).all()


def test_crossings_say_who_is_faster_from_where_on() -> None:
    text = crossing_text(Crossing(20_480, 5.0, "one", "other"))
    assert text == "from 20k tokens on other is faster than one (5 ms)"


def test_memory_is_stacked_up_to_the_peak(question: Question) -> None:
    plan = preset("quantspec", question.workload)
    memory = memory_over_contexts(plan, question, CONTEXTS)
    figure = charts.memory_over_context(CONTEXTS, memory, 40e9, 65_536)
    stacked = [trace for trace in figure.data if trace.stackgroup]
    assert np.sum([trace.y for trace in stacked], axis=0) == pytest.approx(memory.peak / 1e9)
    assert figure.layout.shapes[0].y0 == 40
    assert figure.layout.yaxis.range[1] > 40
    assert {trace.yaxis for trace in figure.data} == {None}  # no staircase within these contexts


def test_the_staircase_climbs_beside_the_memory() -> None:
    question = ask(MODEL, "h200", 40_000, memory_limit="22GB", new_tokens=1)
    plan = preset("autoregressive", question.workload)
    steps = offload_staircase(plan, question)
    contexts = (1024, 131_072)
    memory = memory_over_contexts(plan, question, contexts)
    stairs = named(charts.memory_over_context(contexts, memory, 22e9, 40_000, steps))["layers that must leave the GPU"]
    assert stairs.line.shape == "hv"
    assert stairs.y[0] == 3  # as two slots for what is streamed take the room of two layers
    assert stairs.x[0] == steps[0].last
    assert list(stairs.y) == sorted(stairs.y)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([OffloadStep(0, 0, 200_000)], "up to the model's longest context, 128k tokens"),
        ([OffloadStep(0, 0, 102_400), OffloadStep(1, 102_400, 1 << 20)], "up to 100k tokens; with 1 layer on the host"),
        ([OffloadStep(0, 0, 102_400)], "A KV cache of up to 100k tokens fits."),
        ([OffloadStep(4, 0, 2048)], "No size fits; with 4 layers on the host, 2k tokens fit"),
    ],
)
def test_the_staircase_in_words(steps: list[OffloadStep], words: str) -> None:
    assert words in staircase_text(steps, 131_072)


def test_numbers_of_tokens_have_three_digits() -> None:
    assert [about(tokens) for tokens in (999, 98_700, 1_326_687)] == ["999", "96.4k", "1.27M"]


def test_filled_symbols_run_and_the_frontier_is_of_those_allowed(question: Question) -> None:
    names = ("autoregressive", "quantspec", "dapq", "specontext")
    curves = {name: over_batches(preset(name, question.workload), question, (1, 2, 4)) for name in names}
    front = charts.front_of({name: curves[name] for name in names[:2]})
    figure = charts.trade_offs(curves, ["autoregressive", "quantspec", "dapq"], front)
    symbols = [trace.marker.symbol for trace in figure.data[:4]]
    assert symbols == ["circle", "square", "diamond", "diamond-open"]  # exact, near-lossless, and two lossy plans
    best = named(figure)["best of those that run and are allowed"]
    inside = {pair for name in names[:2] for pair in zip(curves[name].per_user, curves[name].per_gpu, strict=True)}
    assert set(zip(best.x, best.y, strict=True)) <= inside
    assert list(best.x) == sorted(best.x)
    numbers = {(label.x, label.y): label.text for label in figure.layout.annotations}
    places = [(np.log10(point.per_user), np.log10(point.per_gpu)) for point in front]
    assert [numbers[place] for place in places] == [f"<b>{number}</b>" for number in range(1, len(front) + 1)]
    assert len(front) >= 3 and not charts.front_of({})


def test_named_dots_are_apart_and_their_names_cover_no_dot(recommendation: Recommendation) -> None:
    dots = [op for op in recommendation.predicted.breakdown if op.flops > 0]
    kept = labelled(dots, 206.0)
    assert 1 < len(kept) <= LABELS
    for row in kept:
        side = -1 if row.intensity > 206 else 1
        for other in set(dots) - {row}:
            wide = side * np.log10(other.intensity / row.intensity)
            high = np.log10(other.flops / other.seconds * row.seconds / row.flops)
            assert not (0.05 < wide < 1 and -APART < high < 0)
            assert other not in kept or max(abs(wide) / 4, abs(high)) > APART


def test_the_ridge_plane_is_flat_and_the_question_lies_on_the_surface(question: Question) -> None:
    hardware = question.profile.hardware
    plane = decode_plane(question.shape, hardware, CONTEXTS, BATCHES)
    figure = charts.ridge_plane(plane, (65_536, 4))
    surfaces = named(figure)
    assert 10 ** np.unique(surfaces["ridge"].z) == pytest.approx([hardware.ridge_point])
    assert 10 ** surfaces["intensity"].z[1][3] == pytest.approx(plane.aggregate[3, 1])
    dot = surfaces["your question"]
    assert (dot.x[0], dot.y[0], 10 ** dot.z[0]) == pytest.approx((16, 2, plane.aggregate[3, 1]))


def test_the_star_is_the_optimum_and_break_even_where_speed_up_is_one(question: Question) -> None:
    grid = speculation_map(preset("quantspec", question.workload), question, np.linspace(0, 1, 201))
    gamma, gain = grid.optimum
    star = named(charts.speculation(grid))[f"optimum: gamma {gamma}, {gain:.2f}x"]
    assert (star.x[0], star.y[0]) == (gamma, grid.predicted.best)
    even = break_even(grid)
    for column, acceptance in zip(grid.speedup.T, even, strict=True):
        if not np.isnan(acceptance):
            assert np.interp(acceptance, grid.acceptances, column) == pytest.approx(1)
    assert not np.isnan(even[-1])


def test_a_price_stands_between_two_batches_that_cost_more_and_less(profile: Profile) -> None:
    """Also where cost rises with the batch, as layers are on the host."""
    tight = plan_map(ask(MODEL, "h200", 65_536, profile=profile, memory_limit="24GB"), CONTEXTS, BATCHES)
    cost = dollars_per_million(tight, 2.5)
    labels = charts.capacity_map(tight, (65_536, 1), 2.5).layout.annotations
    assert len(labels) >= 2
    for label in labels:
        column, row = CONTEXTS.index(round(2**label.x)), int(np.searchsorted(np.log2(BATCHES), label.y))
        price = float(label.text.removeprefix("$").partition(" ")[0])
        assert min(cost[column, row - 1 : row + 1]) <= price <= max(cost[column, row - 1 : row + 1])
    assert (np.diff(cost[-1][tight.fits[-1]]) > 0).any()


# The figures hold what the predictions say.


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_parts_of_a_round_add_up_to_the_time_per_token(recommendation: Recommendation) -> None:
    figure = charts.round_parts(recommendation)
    lengths = [sum(trace.x[index] for trace in figure.data) for index in range(2)]
    assert lengths == pytest.approx([recommendation.predicted.best.tpot_ms, recommendation.baseline.best.tpot_ms])
    assert figure.layout.barmode == "stack"
    assert figure.data[0].y == (recommendation.name, charts.PLAIN)


def test_the_waterfall_leads_from_plain_decoding_to_the_plan(recommendation: Recommendation) -> None:
    (trace,) = charts.waterfall(recommendation.predicted, recommendation.baseline, recommendation.name).data
    assert (trace.measure[0], trace.measure[-1]) == ("absolute", "total")
    assert sum(trace.x[:-1]) == pytest.approx(trace.x[-1])
    ends = recommendation.baseline.best.tpot_ms, recommendation.predicted.best.tpot_ms
    assert (trace.x[0], trace.x[-1]) == pytest.approx(ends, rel=0.02)
    saved = dict(zip(trace.y, trace.x, strict=True))
    assert saved["attention"] < saved["linear layers"] < 0  # at a long context the KV cache weighs most


def test_time_without_kernels_is_in_both_charts(profile: Profile) -> None:
    """Half a millisecond after each round is its overhead, of which no operation knows."""
    gaps = replace(profile, classes={**profile.classes, "gap": Rates(1.0, 1.0, 1e-5, 0.0)}, round_s=5e-4)
    slow = recommend("Llama-3.1-8B", "h200", 120_000, profile=gaps)
    parts = traces(charts.round_parts(slow))
    assert parts["overhead"].x == pytest.approx([0.5 / slow.predicted.tokens_per_round, 0.5])
    assert rounds.operation_ms(slow.baseline)["between kernels"] == pytest.approx(32 * 0.01)  # 10 us in each layer


def test_plain_decoding_drafts_nothing(recommendation: Recommendation) -> None:
    parts = traces(charts.round_parts(recommendation))
    assert parts["draft"].x[1] == 0
    assert parts["draft"].x[0] == pytest.approx(
        recommendation.predicted.gamma
        * recommendation.predicted.draft_step_ms
        / recommendation.predicted.tokens_per_round
    )


def test_roofline_has_a_dot_per_operation_under_its_roof(recommendation: Recommendation, profile: Profile) -> None:
    hardware = profile.hardware
    answer = traces(charts.roofline(recommendation.predicted, hardware))
    assert set(answer) == {"roof", "prefill", "draft", "target", "ridge"}
    dots = [dot for part in rooflines.PASS_COLORS for dot in zip(answer[part].x, answer[part].y, strict=True)]
    assert len(dots) == sum(op.flops > 0 for op in recommendation.predicted.breakdown)  # copies compute nothing
    for intensity, reached in dots:
        assert reached <= min(hardware.compute_flops, intensity * hardware.bandwidth_bytes_per_s)
    assert answer["ridge"].x == (hardware.ridge_point,)
    assert max(answer["roof"].y) == hardware.compute_flops


def test_roofline_of_plain_decoding_has_no_drafts(recommendation: Recommendation, profile: Profile) -> None:
    assert "draft" not in traces(charts.roofline(recommendation.baseline, profile.hardware))


def test_every_alternative_has_a_bar_with_its_reason(recommendation: Recommendation) -> None:
    figure = charts.alternatives(recommendation)
    shown = {name: reason for trace in figure.data for name, reason in zip(trace.y, trace.customdata, strict=True)}
    assert shown == {short_name(recommendation.name): "recommended"} | {
        short_name(other.preset): other.rejected for other in recommendation.alternatives
    }
    verdicts = traces(figure)
    assert verdicts["recommended"].y == (short_name(recommendation.name),)
    assert "dapq" in verdicts["quality"].y
    assert min(min(trace.error_x.array) for trace in figure.data) >= 0


@pytest.mark.parametrize("objective", ["latency", "total", "memory"])
@pytest.mark.parametrize("memory_limit", [None, 34 * GIB])
def test_every_verdict_has_a_colour(profile: Profile, objective: str, memory_limit: float | None) -> None:
    recommendation = recommend(
        "meta-llama/Llama-3.1-8B", "h200", 120_000, profile=profile, objective=objective, memory_limit=memory_limit
    )
    bars = sum(len(trace.y) for trace in charts.alternatives(recommendation).data)
    assert bars == len(recommendation.alternatives) + 1


def test_operations_never_exceed_the_round(recommendation: Recommendation) -> None:
    shorter = replace(recommendation.predicted, round_s={"draft": 0.0, "verification": 1e-9})
    assert sum(rounds.operation_ms(shorter).values()) == pytest.approx(sum(rounds.part_ms(shorter).values()))


def test_operations_of_drafts_count_once_for_each_draft(recommendation: Recommendation) -> None:
    predicted = recommendation.predicted
    assert predicted.gamma > 1
    seconds = {
        part: sum(op.seconds for op in predicted.breakdown if op.part == part and category(op.kind) == "attention")
        for part in ("draft", "target")
    }
    in_a_round = predicted.gamma * seconds["draft"] + seconds["target"]
    assert rounds.operation_ms(predicted)["attention"] == pytest.approx(1e3 * in_a_round / predicted.tokens_per_round)


def test_bars_of_alternatives_reach_from_low_to_high(recommendation: Recommendation) -> None:
    expected = {short_name(other.preset): other.predicted for other in recommendation.alternatives}
    expected[short_name(recommendation.name)] = recommendation.predicted
    for trace in charts.alternatives(recommendation).data:
        ends = zip(trace.y, trace.x, trace.error_x.arrayminus, trace.error_x.array, strict=True)
        for name, best, below_ms, above_ms in ends:
            band = (expected[name].low.tpot_ms, expected[name].high.tpot_ms)
            assert (best - below_ms, best + above_ms) == pytest.approx(band)


def test_the_bar_through_the_star_is_the_band_of_the_acceptance(question: Question) -> None:
    grid = speculation_map(preset("quantspec", question.workload), question, np.linspace(0, 1, 21))
    gamma, gain = grid.optimum
    star = named(charts.speculation(grid))[f"optimum: gamma {gamma}, {gain:.2f}x"]
    ends = (star.y[0] - star.error_y.arrayminus[0], star.y[0] + star.error_y.array[0])
    assert ends == pytest.approx((grid.predicted.low, grid.predicted.high))


def test_a_methods_line_holds_its_own_means_over_windows() -> None:
    means = {("dapq", 32): 0.9, ("dapq", 64): 0.95, ("snapkv", 32): 0.5, ("snapkv", 64): 0.6}
    rows = [{"figure": ("attention", *key), "mean": mean, "deviation": 0.0} for key, mean in means.items()]
    lines = named(results.attentions(rows))
    assert {name: (list(line.x), list(line.y)) for name, line in lines.items()} == {
        "dapq": ([32, 64], [0.9, 0.95]),
        "snapkv": ([32, 64], [0.5, 0.6]),
    }


def test_recalls_have_a_panel_for_each_budget() -> None:
    means = {("dapq", 256): 0.7, ("snapkv", 256): 0.4, ("dapq", 1024): 0.9, ("snapkv", 1024): 0.8}
    rows = [
        {"figure": ("recall", method, 32, budget), "mean": mean, "deviation": 0.0}
        for (method, budget), mean in means.items()
    ]
    figure = results.recalls(rows)
    assert [note.text for note in figure.layout.annotations] == ["budget 256", "budget 1024"]
    assert [(line.xaxis, line.name, list(line.y)) for line in figure.data] == [
        ("x", "dapq", [0.7]), ("x", "snapkv", [0.4]), ("x2", "dapq", [0.9]), ("x2", "snapkv", [0.8]),
    ]  # fmt: skip


def test_the_figure_of_traffic_has_every_percentile_and_limit() -> None:
    rates = (1.0, 2.0)
    result = serving_capacity(
        "Llama-3.1-8B", "h200", rates, isl="4k", osl="64", traffic=Traffic(requests=200, replicas=1),
        limits=LatencyLimits(ttft_s=2.0), backend="vllm",
    )  # fmt: skip
    lines = [(line.name, list(line.y)) for name in LATENCIES for line in charts.latency_figure(result, name).data]
    expected = [
        (f"p{percentile}", [getattr(row, f"{name}_p{percentile}_ms") for row in result.rows])
        for name in ("ttft", "tpot")
        for percentile in (50, 90, 99)
    ]
    assert lines == expected
    points = charts.front_figure([result]).data[0]
    assert list(points.x) == [row.tpot_p50_ms for row in result.rows]
    assert list(points.y) == [row.output_tokens_per_s_per_gpu for row in result.rows]
    limits = [[shape.y0 for shape in charts.latency_figure(result, name).layout.shapes] for name in LATENCIES]
    assert limits == [[2000.0], []]


def test_accepted_share_by_gamma_and_choices_of_pseudo_queries():
    """Of gamma 2 with conditional acceptance 0.5 and 0.5, (0.5 + 0.25) / 2 of the drafts are accepted."""
    row = {"policy": "quest", "ratio": 0.07, "format": "bf16", "by_position": (0.5, 0.5)}
    (line,) = html_pages.by_gamma([row]).data
    assert (list(line.x), list(line.y)) == ([1, 2], [0.5, 0.375])
    figures = {("content", "span", 64): 0.6, ("content", "random", 64): 0.5, ("position", "after", 64): 0.7}
    drawn = results.choices([{"figure": ["choice", *key], "mean": mean} for key, mean in figures.items()])
    assert [(bar.name, list(bar.x), list(bar.y)) for bar in drawn.data] == [
        ("content, 64 tokens", ["span", "random"], [0.6, 0.5]), ("position, 64 tokens", ["after"], [0.7]),
    ]  # fmt: skip
