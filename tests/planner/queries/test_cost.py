"""What serving costs, against counts by hand."""

import pytest

from ridgeplan.planner import PlanError, predict, preset, recommend, resolve, workload_for
from ridgeplan.planner.queries.cost import LatencyLimits, serving_cost

LLAMA = "meta-llama/Llama-3.1-8B"


def test_dollars_are_the_hours_of_a_batch_over_its_tokens() -> None:
    """By hand, from the prediction of plain decoding: 8 prompts, then 512 steps, 8 x 512 tokens."""
    costs = serving_cost(LLAMA, {"h200": 3.6}, 4096, batches=(8,), preset="autoregressive", new_tokens=512)
    shape, profile = resolve(LLAMA, "h200")
    workload = workload_for(shape, profile, 4096, 512, 8, yarn=False)
    figures = predict(preset("autoregressive", workload), shape, profile).best
    seconds = (figures.ttft_ms + 512 * figures.tpot_ms) / 1e3
    (row,) = costs.rows
    assert row.dollars_per_million == pytest.approx(3.6 / 3600 * seconds / (8 * 512) * 1e6)
    assert row.tokens_per_s == pytest.approx(8 * 512 / seconds)
    assert (row.ttft_ms, row.tpot_ms) == pytest.approx((figures.ttft_ms, figures.tpot_ms))
    assert row.ttft_request_ms == pytest.approx(figures.ttft_ms / 8) == pytest.approx(figures.ttft_request_ms)


@pytest.mark.parametrize(("gpu", "context", "batches"), [("h200", 4096, (1, 16)), ("a100-80gb", 32_768, (4,))])
def test_a_row_s_plan_is_the_recommended_one(gpu: str, context: int, batches: tuple[int, ...]) -> None:
    for row in serving_cost(LLAMA, {gpu: 2.5}, context, batches=batches).rows:
        answer = recommend(LLAMA, gpu, context, batch=row.batch)
        assert (row.plan, row.name) == (answer.plan, answer.name)
        assert row.tpot_ms == pytest.approx(answer.predicted.best.tpot_ms)


def test_twice_the_price_costs_twice_as_much() -> None:
    cheap, dear = (serving_cost(LLAMA, {"h200": price}, 8192, batches=(1, 16)).rows for price in (1.0, 2.0))
    assert [row.dollars_per_million for row in dear] == pytest.approx([2 * row.dollars_per_million for row in cheap])


def test_limits_rule_out_rows_and_the_cheapest_of_the_rest_is_named() -> None:
    free = serving_cost(LLAMA, {"h200": 2.5}, 8192)
    fitting = [row for row in free.rows if row.fits]
    assert free.cheapest == min(fitting, key=lambda row: row.dollars_per_million)
    assert not any(row.plan.placement.offload for row in free.rows)
    assert free.rows[-1].batch == 128  # 256 sequences of 9216 tokens hold more than the GPU
    (larger,) = serving_cost(LLAMA, {"h200": 2.5}, 8192, batches=(256,)).rows
    assert larger.plan.placement.offload
    tight = serving_cost(LLAMA, {"h200": 2.5}, 8192, limits=LatencyLimits(tpot_s=0.010))
    assert [row.misses for row in tight.rows] == [("TPOT",) if row.tpot_ms > 10 else () for row in free.rows]
    assert tight.cheapest is not None
    assert tight.cheapest.tpot_ms <= 10
    assert tight.cheapest.dollars_per_million > free.cheapest.dollars_per_million
    impossible = serving_cost(LLAMA, {"h200": 2.5}, 8192, limits=LatencyLimits(ttft_s=1e-6))
    assert impossible.cheapest is None
    assert impossible.to_dict()["cheapest"] is None


def test_what_does_not_fit_is_no_bargain() -> None:
    """Weights of 8 bits alone take 8 GB."""
    costs = serving_cost(LLAMA, {"h200": 2.5}, 8192, batches=(1, 64), memory_limit="6GB")
    assert [row.fits for row in costs.rows] == [False, False]
    assert costs.cheapest is None


def test_several_gpus_have_prices_of_their_own() -> None:
    costs = serving_cost(LLAMA, {"h200": 3.5, "rtx4090": 0.35}, 4096, batches=(1,))
    assert [row.gpu for row in costs.rows] == ["h200", "rtx4090"]
    single = [serving_cost(LLAMA, {gpu: price}, 4096, batches=(1,)).rows[0] for gpu, price in
             (("h200", 3.5), ("rtx4090", 0.35))]  # fmt: skip
    assert list(costs.rows) == single


def test_prices_are_checked() -> None:
    with pytest.raises(PlanError, match=r"the price of h200 is 0\.0; allowed: dollars per hour above 0"):
        serving_cost(LLAMA, {"h200": 0.0}, 4096)


def test_a_limit_on_the_first_token_is_of_one_request() -> None:
    """The last prompt of 16 waits for the others; a limit of three prompts' time is missed by none of the rows."""
    free = serving_cost(LLAMA, {"h200": 2.5}, 8192, batches=(1, 16))
    limit_s = 3 * max(row.ttft_request_ms for row in free.rows) / 1e3
    assert free.rows[1].ttft_ms / 1e3 > limit_s
    limits = LatencyLimits(ttft_s=limit_s)
    assert [row.misses for row in serving_cost(LLAMA, {"h200": 2.5}, 8192, batches=(1, 16), limits=limits).rows] == [
        (),
        (),
    ]
