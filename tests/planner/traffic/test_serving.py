"""Serving capacity: percentiles, replicas, dollars and limits of whole questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner import NothingFits, PlanError, compare, recommend
from ridgeplan.planner.queries.cost import LatencyLimits, serving_cost
from ridgeplan.planner.traffic.serving import LoadRow, ServingCapacity, Traffic, serving_capacity
from ridgeplan.roofline.catalog.hardware import load_hardware

LLAMA = "meta-llama/Llama-3.1-8B"


def served(*rates: float, limits: LatencyLimits | None = None, **others: Any) -> ServingCapacity:
    traffic = {name: others.pop(name) for name in (*Traffic.__dataclass_fields__,) if name in others}
    lengths = {} if "trace" in others else {"isl": "lognormal:4k", "osl": "128"}
    options = {"backend": "vllm", **lengths, **others}
    return serving_capacity(
        LLAMA, "h200", rates, traffic=Traffic(**{"requests": 800} | traffic), limits=limits, **options
    )


def test_percentiles_and_use_rise_with_the_rate() -> None:
    rows = served(0.5, 2.0, 4.0, replicas=1).rows
    for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "kv_mean", "busy"):
        figures = [getattr(row, name) for row in rows]
        assert figures == sorted(set(figures)), name
    for row in rows:
        assert row.ttft_p50_ms <= row.ttft_p90_ms <= row.ttft_p99_ms
        assert row.requests_per_s == pytest.approx(row.rate, rel=0.1)
        assert row.output_tokens_per_s == pytest.approx(128 * row.requests_per_s)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    assert served(2.0, seed=3) == served(2.0, seed=3)
    assert served(2.0, seed=3).rows != served(2.0, seed=4).rows


def test_the_replicas_are_the_fewest_within_the_limits() -> None:
    limits = LatencyLimits(2.0, 0.012)
    (row,) = served(12.0, limits=limits).rows
    assert row.meets
    assert row.replicas > 2
    (fewer,) = served(12.0, limits=limits, replicas=row.replicas - 1).rows
    assert set(fewer.misses) & {"TTFT", "TPOT"}
    assert fewer.goodput_per_s < row.goodput_per_s
    assert row.ttft_p99_ms <= 2000
    assert row.tpot_p99_ms <= 12


def test_limits_that_a_lone_request_misses_fit_no_number_of_gpus() -> None:
    with pytest.raises(NothingFits, match=r"99th percentile of TPOT is .* even without load; allowed: a limit above"):
        served(1.0, limits=LatencyLimits(tpot_s=0.001))
    with pytest.raises(NothingFits, match="99th percentile of TTFT"):
        served(1.0, limits=LatencyLimits(ttft_s=0.001))


def spent(row: LoadRow) -> float:
    """Dollars per second of the output and the prompts."""
    assert row.dollars_per_million_output is not None
    assert row.dollars_per_million_prompt is not None
    prompts = row.dollars_per_million_prompt * row.prompt_tokens_per_s
    return (row.dollars_per_million_output * row.output_tokens_per_s + prompts) / 1e6


def test_dollars_are_the_hours_of_all_gpus() -> None:
    for replicas in (1, 3):
        (row,) = served(2.0, replicas=replicas, price=3.6).rows
        assert spent(row) == pytest.approx(replicas * 3.6 / 3600)
    assert spent(served(2.0).rows[0]) == pytest.approx(load_hardware("h200").dollars_per_hour / 3600)


def test_degrees_and_replicas_multiply_the_gpus_and_their_dollars() -> None:
    """Of the degrees of four GPUs, the limits leave those that need the fewest."""
    limits = LatencyLimits(3.0, 0.08)
    traffic = Traffic(requests=200)
    four = serving_capacity("Llama-3.1-70B", "h200", (0.3,), isl="4k", osl="64", traffic=traffic, limits=limits, gpus=4)
    (row,) = four.rows
    assert row.meets and four.degrees == "tp 2" and row.gpus == 2 * row.replicas
    assert row.output_tokens_per_s_per_gpu * row.gpus == pytest.approx(row.output_tokens_per_s)
    assert spent(row) == pytest.approx(row.gpus * load_hardware("h200").dollars_per_hour / 3600)


def test_energy_is_that_of_steps_at_the_watts_given_measured_or_listed() -> None:
    """On an H200 decoding takes less than prompts, on an H100 it was not measured."""

    def busy_watts(gpu: str, watts: float | None = None) -> tuple[float, str]:
        answer = serving_capacity(
            "Llama-3.1-70B", gpu, (0.3,), isl="4k", osl="64", traffic=Traffic(requests=200), tensor_parallel=2,
            watts=watts, preset="int8-weights",
        )  # fmt: skip
        (row,) = answer.rows
        assert row.joules_per_output_token is not None
        return row.joules_per_output_token * row.output_tokens_per_s / (row.busy * row.gpus), " ".join(answer.notes)

    assert busy_watts("h200", 450.0)[0] == pytest.approx(450) and "energy" not in busy_watts("h200", 450.0)[1]
    h200, h100 = load_hardware("h200"), load_hardware("h100")
    watts, notes = busy_watts("h200")
    assert h200.decode_watts < watts < h200.board_watts and "519 W while decoding" in notes
    unlisted = serving_capacity("Llama-3.1-8B", "gh200", (1.0,), isl="1k", osl="8", traffic=Traffic(requests=10))
    assert unlisted.rows[0].joules_per_output_token is None and "no power is listed" in " ".join(unlisted.notes)
    watts, notes = busy_watts("h100")
    assert watts == pytest.approx(h100.board_watts) and "energy was not measured" in notes


def test_prompts_on_other_gpus_leave_decoding_alone() -> None:
    """Decodes wait for no prompt, and share a GPU with more of their kind."""
    mixed, split = served(4.0, replicas=3).rows[0], served(4.0, replicas=1, prefill_replicas=2).rows[0]
    single = served(0.01, replicas=1).rows[0]
    assert split.gpus == mixed.gpus == 3 and split.output_tokens_per_s == pytest.approx(
        mixed.output_tokens_per_s, rel=0.02
    )
    assert split.tpot_p99_ms < mixed.tpot_p99_ms
    assert split.tpot_p50_ms > single.tpot_p50_ms
    assert split.cached_share == 0


def test_bursts_wait_longer() -> None:
    even, bursts = (served(2.0, burstiness=shape, replicas=1).rows[0] for shape in (10.0, 0.1))
    assert bursts.ttft_p99_ms > 1.5 * even.ttft_p99_ms


def test_a_prefix_cache_shortens_the_wait() -> None:
    plain, cached = (served(4.0, prefix_share=share, replicas=1).rows[0] for share in (0.0, 0.6))
    assert cached.ttft_p50_ms < plain.ttft_p50_ms
    assert cached.cached_share == pytest.approx(0.6, abs=0.01)
    with pytest.raises(PlanError, match="runtime has no prefix cache; allowed: `backend=vllm`, or no shared"):
        served(4.0, prefix_share=0.5, backend="ridgeplan")


def test_speculation_has_fewer_milliseconds_per_token_at_low_load() -> None:
    plain, drafts = (
        served(0.5, backend="ridgeplan", preset=name, isl="32k") for name in ("autoregressive", "quantspec")
    )
    assert "gamma" in drafts.plan
    assert drafts.rows[0].tpot_p50_ms < 0.8 * plain.rows[0].tpot_p50_ms
    assert "a server that adds requests between rounds is assumed" in " ".join(drafts.notes)
    with pytest.raises(PlanError, match="gamma is 3; allowed: none, as autoregressive drafts nothing"):
        served(1.0, gamma=3)


def test_a_trace_is_served_at_its_own_rate_or_at_another(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 250 * place, "input_length": 2048, "output_length": 64, "hash_ids": [0, 1, 2, 10 + place]}
        for place in range(200)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    answer = served(trace=trace)
    (row,) = answer.rows
    assert answer.traffic.requests == 200
    assert row.rate == pytest.approx(4.0)
    assert row.cached_share == pytest.approx(0.75, abs=0.02)
    faster, fastest = served(8.0, 16.0, trace=trace).rows
    assert (faster.rate, fastest.rate) == (8.0, 16.0)
    assert row.ttft_p99_ms <= faster.ttft_p99_ms <= fastest.ttft_p99_ms


def test_requests_longer_than_the_cache_are_rejected_and_counted() -> None:
    result = served(1.0, isl="lognormal:8k:2", memory_limit="21GB", replicas=1)
    (row,) = result.rows
    assert row.rejected > 0
    assert row.misses == ("rejected",)
    assert any(f"{row.rejected} requests do not fit the KV cache of" in note for note in result.notes)


def test_requests_of_a_trace_beyond_the_model_s_context_are_rejected(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:{second:02},{1000 if second % 10 else 140_000},100" for second in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n", encoding="utf-8")
    result = served(trace=trace, replicas=1)
    assert result.rows[0].rejected == 6
    assert "6 requests do not fit the model's context of 131072 tokens: rejected" in result.notes
    with pytest.raises(PlanError, match="a trace has lengths of its own; allowed: it alone"):
        served(trace=trace, isl="4k")


def test_of_degrees_that_serve_the_whole_rate_the_fastest_are_taken() -> None:
    shared = {"isl": "2k", "osl": "256", "traffic": Traffic(requests=300), "backend": "vllm"}
    model, rates = "deepseek-ai/DeepSeek-V3", (0.5,)  # which 8 GPUs hold, and not 4
    (row,) = serving_capacity(model, "h200", rates, gpus=8, **shared).rows
    for tensor in (8, 2):
        degrees = {"tensor_parallel": tensor, "data_parallel": 8 // tensor}
        (fixed,) = serving_capacity(model, "h200", rates, **degrees, **shared).rows
        assert row.output_tokens_per_s_per_gpu >= 0.95 * fixed.output_tokens_per_s_per_gpu
        assert row.tpot_p99_ms <= fixed.tpot_p99_ms
    assert row.tpot_p99_ms < 0.9 * fixed.tpot_p99_ms


def test_what_is_missing_or_out_of_range_is_named() -> None:
    with pytest.raises(PlanError, match="there is no rate; allowed: a rate of requests, or a trace"):
        served()
    with pytest.raises(PlanError, match="power is -1; allowed: watts of a GPU above 0"):
        served(1.0, watts=-1)
    with pytest.raises(PlanError, match="price is 0; allowed: dollars per GPU-hour above 0"):
        served(1.0, price=0)
    with pytest.raises(PlanError, match="requests is 0; allowed: a whole number from 1"):
        served(1.0, requests=0)
    with pytest.raises(PlanError, match="quantspec: vllm has no self-speculation"):
        served(1.0, preset="quantspec")


def test_the_answer_is_plain_json_and_a_table() -> None:
    result = served(1.0, 2.0, replicas=1, price=2.0)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["rows"][1]["rate"] == 2.0
    assert [row["rate"] for row in result.table()] == [1.0, 2.0]
    assert "GPUs by rate: 1/s: 1, 2/s: 1" in result.summary()


@pytest.mark.parametrize(
    ("model", "gpu", "degrees"),
    [(LLAMA, "h200", {}), ("Qwen3-Next-80B-A3B-Instruct", "b200", {}),
     ("Llama-3.1-70B", "h200", {"tensor_parallel": 2, "pipeline_parallel": 2})],
)  # fmt: skip
def test_every_verb_has_the_same_time_to_the_first_token(model: str, gpu: str, degrees: dict[str, int]) -> None:
    options: dict[str, Any] = {"backend": "vllm", "new_tokens": 64, **degrees}
    plan = recommend(model, gpu, 128, quality="exact", **options).predicted.best
    (compared,) = compare(model, gpu, 128, presets="autoregressive", **options).plans
    (row,) = serving_cost(model, {gpu: 1.0}, 128, batches=(1,), preset="autoregressive", **options).rows
    alone = Traffic(requests=5, replicas=1, max_num_seqs=4, batched_tokens=512)
    simulated = serving_capacity(model, gpu, [1e-3], isl="128", osl="64", traffic=alone, **options).rows[0]
    verbs = [plan.ttft_request_ms, compared.predicted.best.ttft_request_ms, row.ttft_request_ms]
    assert verbs == pytest.approx(3 * [simulated.ttft_p50_ms], rel=1e-3)
    assert [plan.tpot_ms, row.tpot_ms] == pytest.approx(2 * [simulated.tpot_p50_ms], rel=1e-2)
