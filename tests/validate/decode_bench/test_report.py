"""Decoding benchmarks run real plans on inflated models and compare like with like."""

import copy
import dataclasses
import json

import pytest
import torch

from ridgeplan.planner import PlanError, Workload
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.quantization.calibration import CalibrationText
from ridgeplan.validate.decode_bench.inflation import InflationError
from ridgeplan.validate.decode_bench.report import (
    PLAIN,
    DecodeCase,
    DecodeOptions,
    bench_decode,
    suite_cases,
    vllm_tpot_ms,
    with_plain,
)
from ridgeplan.validate.prompts import PromptError, prompt_batch
from ridgeplan.validate.random_model import llama_like_shape


class Letters:
    """A tokenizer with one token a character."""

    def encode(self, text):
        return list(map(ord, text))


def test_prompts_of_a_batch_differ_and_have_their_length():
    prompts = prompt_batch(Letters(), 5, 3, "abcdefghij")
    assert ["".join(map(chr, prompt)) for prompt in prompts] == ["abcde", "cdefg", "fghij"]
    assert len(prompt_batch(Letters(), 10, 1, "abcdefghij")[0]) == 10
    with pytest.raises(PromptError, match="the text has 10 tokens; needed: 11, for 2 parts of 10"):
        prompt_batch(Letters(), 10, 2, "abcdefghij")


def test_a_suite_holds_every_part_of_the_ablation():
    cases = suite_cases([(4096, 1), (32768, 8)], [2, 4])
    assert len(cases) == 2 * (2 + 3 * 2)
    assert cases[0] == DecodeCase("autoregressive", 4096, 1)
    assert DecodeCase("quantspec-kv", 32768, 8, 4) in cases


def test_cases_follow_plain_decoding_of_their_workload():
    chosen = [
        DecodeCase("quantspec", 32768, 8, 3), DecodeCase("int8", 4096, 1), DecodeCase("quantspec", 32768, 8, 4),
        DecodeCase("int8", 4096, 1),
    ]  # fmt: skip
    plain = [DecodeCase(PLAIN, 4096, 1), DecodeCase(PLAIN, 32768, 8)]
    assert with_plain(chosen) == [plain[0], chosen[1], plain[1], chosen[0], chosen[2]]
    assert with_plain([chosen[0], *plain]) == [*plain, chosen[0]]


def test_peers_are_looked_up_by_device_model_and_workload():
    assert vllm_tpot_ms("NVIDIA H200", "meta-llama/Llama-3.1-8B", 131072, 4) == 20.93
    assert vllm_tpot_ms("NVIDIA H200", "meta-llama/Llama-3.1-8B", 131072, 2) is None
    assert vllm_tpot_ms("cpu", "meta-llama/Llama-3.1-8B", 4096, 1) is None


@pytest.mark.model
def test_mistakes_in_a_later_case_are_found_before_the_first_runs(model, h200_profile):
    seen = []
    for case, error in (
        (DecodeCase("quantspec", 64, 1, 10**6), PlanError),
        (DecodeCase(PLAIN, 10**6, 1), PlanError),
        (DecodeCase("specontext", 64, 1), UnsupportedPlan),  # no head was trained for the inflated model
    ):
        with pytest.raises(error):
            bench_decode(
                model, [DecodeCase(PLAIN, 64, 1), case], DecodeOptions(h200_profile, 2), on_progress=seen.append
            )
    long = [DecodeCase(PLAIN, 64, 1), DecodeCase(PLAIN, 300, 1)]
    with pytest.raises(PromptError, match="needed: 300"):
        bench_decode(model, long, DecodeOptions(h200_profile, 2, text="one two three " * 50), on_progress=seen.append)
    assert seen == []


@pytest.mark.model
def test_one_new_token_has_no_speed(model, h200_profile, monkeypatch):
    monkeypatch.setattr("ridgeplan.validate.decode_bench.report.vllm_tpot_ms", lambda *_: 5.0)
    cases = [DecodeCase(PLAIN, 64, 1), DecodeCase("quantspec-kv", 64, 1, 2)]
    report = bench_decode(model, cases, DecodeOptions(h200_profile, 1))
    assert [row.over_vllm for row in report.rows] == [None, None]
    assert json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.model
def test_cases_are_compared_with_plain_decoding_of_their_workload_or_with_nothing(model, h200_profile):
    cases = [DecodeCase("quantspec-kv", 64, 1, 2), DecodeCase(PLAIN, 64, 1), DecodeCase("quantspec-kv", 32, 1, 2)]
    drafted, plain, single = bench_decode(model, cases, DecodeOptions(h200_profile, 4)).rows
    tpots_ms = [row.measured.tpot_ms for row in (drafted, plain)]
    faster = [row.comparison.row("speed-up over plain decoding").measured for row in (drafted, plain, single)]
    assert faster == [pytest.approx(tpots_ms[1] / tpots_ms[0]), 1, None]


@pytest.mark.model
def test_draft_weights_are_made_once_and_not_before_other_plans_ran(model, h200_profile, monkeypatch):
    model, events = copy.copy(model), []  # its method is replaced

    def quantizing(decoder, weights, group, text, on_progress):
        assert text is model.text
        events.append("quantized")
        return dataclasses.replace(weights)

    monkeypatch.setattr("ridgeplan.runtime.engine.quantized_draft", quantizing)
    cases = [DecodeCase("quantspec", 64, 1, 1), DecodeCase("quantspec", 64, 2, 2), DecodeCase(PLAIN, 64, 1)]
    make_engine = model.engine

    def engine(plan, drafts, **options):
        events.append(("engine", plan.workload.batch, drafts is not None))
        return make_engine(plan, drafts, **options)

    object.__setattr__(model, "engine", engine)
    report = bench_decode(model, cases, DecodeOptions(h200_profile, 2))
    assert events == [("engine", 1, False), ("engine", 1, False), "quantized", ("engine", 2, True)]
    assert [row.case for row in report.rows] == cases
    assert report.rows[0].comparison.row("speed-up over plain decoding").measured != 1


@pytest.mark.model
def test_a_calibration_text_is_what_draft_weights_are_fitted_to(model, h200_profile, monkeypatch):
    seen = []

    def quantizing(decoder, weights, group, text, on_progress):
        seen.append((group, text.tokens.tolist(), text.natural))
        return dataclasses.replace(weights)

    monkeypatch.setattr("ridgeplan.runtime.engine.quantized_draft", quantizing)
    cases = [DecodeCase("quantspec-kv", 64, 1, 1), DecodeCase("quantspec", 64, 1, 1), DecodeCase("quantspec", 64, 1, 2)]
    report = bench_decode(model, cases, DecodeOptions(h200_profile, 2, calibration=[5, 6, 7]))
    assert seen == [(128, [[5, 6, 7]], True)]
    assert report.to_dict()["calibration_tokens"] == 3


@pytest.mark.model
def test_shapes_that_cannot_be_held_are_refused_before_anything_is_loaded(smollm2):
    from ridgeplan.validate.decode_bench.inflated_model import InflatedModel

    with pytest.raises(InflationError, match=r"weights of .* take \d+\.\d GB; allowed here: \d+\.\d GB"):
        InflatedModel.load(str(smollm2), llama_like_shape(2000, 8192, 32768, 64, 8, 128), "cpu")
    with pytest.raises(InflationError, match="is not a plain dense decoder"):
        InflatedModel.load(str(smollm2), load_shape("Qwen/Qwen3-30B-A3B"), "cpu")


@pytest.mark.model
def test_plain_and_speculative_decoding_are_measured_beside_their_predictions(model, h200_profile):
    cases = [DecodeCase("autoregressive", 64, 2), DecodeCase("quantspec-kv", 64, 2, 2)]
    seen = []
    report = bench_decode(
        model,
        cases,
        DecodeOptions(h200_profile, 6, temperature=1.0),
        on_progress=lambda *progress: seen.append(progress[1:]),
    )
    assert seen == [(1, 2), (2, 2)]
    plain, drafted = report.rows
    assert (plain.gamma, drafted.gamma) == (0, 2)
    assert plain.measured.tokens[0] != plain.measured.tokens[1]
    assert drafted.measured.statistics.generated == 12
    assert plain.comparison.row("speed-up over plain decoding").measured == 1.0
    faster = drafted.comparison.row("speed-up over plain decoding").measured
    assert faster == pytest.approx(plain.measured.tpot_ms / drafted.measured.tpot_ms)
    assert plain.over_vllm is None
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["rows"][1]["measured"]["tokens_per_round"] == drafted.measured.statistics.tokens_per_round
    assert saved["temperature"] == 1.0
    assert saved["model"] == "llama, 30 layers of 576"


def test_a_preset_that_adapts_is_timed_as_one(h200_profile):
    speculation = DecodeCase("adaptive-cascade", 4096, 1).plan(load_shape("Llama-3.1-8B"), h200_profile, 64).speculation
    assert speculation.adaptive and (speculation.gamma, speculation.drafter.passes) == (15, 3)


@pytest.mark.model
def test_an_adaptive_gamma_on_random_tokens_runs_beside_plain_decoding(model, h200_profile):
    cases = with_plain([DecodeCase("quantspec-kv", 64, 1, 4, adaptive=True)])
    report = bench_decode(model, cases, DecodeOptions(h200_profile, 24, random_tokens=True, temperature=1.0))
    plain, adaptive = report.rows
    statistics = adaptive.measured.statistics
    assert sum(statistics.rounds_at) == statistics.rounds > 0
    assert len(statistics.rounds_at) == 5
    assert plain.measured.statistics.rounds_at == (23,)
    names = [row.name for row in adaptive.comparison.rows]
    assert "tpot at the measured acceptance" in names
    saved = json.loads(json.dumps(report.to_dict()))["rows"]
    assert [row["adaptive"] for row in saved] == [False, True]
    assert saved[1]["measured"]["rounds_at"] == list(statistics.rounds_at)


@pytest.mark.model
def test_the_small_model_itself_writes_what_4_bit_weights_are_fitted_to(model, monkeypatch):
    """The large one has tokens that the small one never saw."""
    writers = []

    def of_model(decoder, weights):
        writers.append((decoder.config.shape.vocab, weights.embedding.shape[0], len(weights.layers)))
        return CalibrationText(torch.zeros(1, 3, dtype=torch.int64), natural=True)

    monkeypatch.setattr(CalibrationText, "of_model", of_model)
    model = dataclasses.replace(model)  # without the text that it may have by now
    assert model.text is model.text
    assert writers == [(49_152, 49_152, 30)]
    assert model.shape.vocab == 49_200


@pytest.mark.slow
@pytest.mark.model
def test_only_the_target_in_use_is_kept(model, monkeypatch):
    model = dataclasses.replace(model, targets={})
    monkeypatch.setitem(vars(model), "text", CalibrationText(torch.arange(20)[None], natural=False))
    plain, quantized = (preset(name, Workload("m", "cpu", 64, 8)) for name in ("autoregressive", "int4-weights"))
    dense = model.engine(plain).weights
    assert model.engine(plain).weights is dense
    assert dense.format.group is None
    int4 = model.engine(quantized).weights
    assert (int4.format.group, int4.bytes < 0.5 * dense.bytes) == (128, True)
    assert list(model.targets.values()) == [int4]
