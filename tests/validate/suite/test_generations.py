"""Rows of real generations: which prediction stands beside which measurement."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.comparison import tpot_ms_at
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.measure import Measured, Segment
from ridgeplan.validate.suite import generations as module
from ridgeplan.validate.suite.generations import Texts, generation_rows, rows_of, small_model

SHAPE = load_shape("SmolLM2-135M")
PLAN = preset("quantspec", Workload("SmolLM2-135M", "h200", 8192, 256))


@pytest.fixture
def measured() -> Measured:
    """40 rounds of 4 drafts that gain 3 tokens each, of 6 ms."""
    statistics = Statistics(
        gamma=4, prompt_tokens=(8000,), rounds=40, sequence_rounds=40, generated=121, decoded=120,
        verified_at=(40, 30, 20, 10), accepted_at=(35, 25, 15, 5), flushes=0, prefill_s=0.1, draft_s=0.001,
        verify_s=0.002, flush_s=0.0, decode_s=0.24, idle_s=0.0, capture_s=0.0, peak_memory_bytes=2 << 30,
        outside_bytes=1 << 29,
    )  # fmt: skip
    return Measured(8000, 121, 1, statistics, segments=(Segment(0.024, 4),) * 8, driver_bytes=3 << 30)


def test_a_gguf_is_priced_as_the_runtime_loads_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights have 4 to 8 bits in the file, and full precision in the engine."""
    monkeypatch.setattr(module, "model_source", Path)
    monkeypatch.setattr(module, "load_tokenizer", lambda source: None)
    monkeypatch.setattr(module, "_calibration", lambda tokenizer, texts: None)
    bits = small_model(str(smollm2), Texts.of(None, None)).shape.weight_bits
    assert {bits.attention, bits.mlp, bits.embedding, bits.head} == {16.0}
    assert load_shape(str(smollm2)).weight_bits.mlp < 9


def test_tpot_is_predicted_at_both_texts_acceptance(measured: Measured, h200_profile: Any) -> None:
    rows = {row.kind: row for row in rows_of(PLAN, SHAPE, h200_profile, measured, 0.6)}
    ran = replace(PLAN, workload=replace(PLAN.workload, context=8000, new_tokens=121))
    assert set(rows) == {
        "TPOT at the measured acceptance", "TPOT at another text's acceptance", "acceptance", "peak memory",
        "memory in use, by the driver",
    }  # fmt: skip
    first, other = rows["TPOT at the measured acceptance"], rows["TPOT at another text's acceptance"]
    assert first.predicted == pytest.approx(tpot_ms_at(ran, SHAPE, h200_profile, 80 / 100))
    assert other.predicted == pytest.approx(tpot_ms_at(ran, SHAPE, h200_profile, 0.6))
    assert first.measured == other.measured == pytest.approx(6 / 3)
    assert rows["acceptance"].measured == 0.8
    assert rows["peak memory"].measured == 2 << 30
    by_driver = rows["memory in use, by the driver"]
    assert by_driver.measured == 3 << 30
    prediction = predict(ran, SHAPE, h200_profile)
    # A captured round keeps its workspace beside that of prefill, and 512 MiB were in use before.
    assert by_driver.predicted == pytest.approx(
        prediction.prefill_peak_bytes + prediction.memory_bytes["decode_workspace"] + (1 << 29)
    )
    assert rows["peak memory"].predicted == predict(ran, SHAPE, h200_profile).best.peak_memory_bytes


def test_plain_decoding_has_a_time_and_a_peak(measured: Measured, h200_profile: Any) -> None:
    statistics = replace(measured.statistics, gamma=0, verified_at=(), accepted_at=(), decoded=40)
    plain = replace(measured, statistics=statistics, driver_bytes=None)
    plan = preset("autoregressive", PLAN.workload)
    rows = list(rows_of(plan, SHAPE, h200_profile, plain, None))
    assert [row.kind for row in rows] == ["TPOT at the measured acceptance", "peak memory"]
    assert rows[0].measured == pytest.approx(6)


def test_the_texts_are_different_parts() -> None:
    texts = Texts.of(None, None)
    example = module.sample_text()
    assert texts.main + texts.other + texts.fitted == example
    assert len(texts.fitted) == pytest.approx(len(example) / 8, abs=2)
    parts = Texts.of("a novel", None)
    assert parts.main == "a novel"
    assert parts.other + parts.fitted == example
    assert Texts.of("a novel", "x" * 80).other == "x" * 60


def test_a_users_model_runs_and_a_busy_machine_is_left_out(
    tiny_folder: Path, h200_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts.of(None, None)
    model = small_model(str(tiny_folder), texts)
    case = DecodeCase("quantspec", 300, 2, 3)
    monkeypatch.setattr("ridgeplan.validate.comparison.is_busy", lambda spread: False)
    rows, reason = generation_rows(model, case, h200_profile, 16, texts)
    assert reason is None
    assert {"TPOT at the measured acceptance", "TPOT at another text's acceptance"} <= {row.kind for row in rows}
    assert all(row.case == "quantspec, gamma 3, 300 tokens, batch 2" for row in rows)
    compare = module.compare_measured

    def busy(*arguments, **others):
        return replace(compare(*arguments, **others), spread=0.5)

    monkeypatch.setattr(module, "compare_measured", busy)
    monkeypatch.setattr("ridgeplan.validate.comparison.is_busy", lambda spread: spread == 0.5)
    rows, reason = generation_rows(model, case, h200_profile, 16, texts)
    assert rows == []
    assert reason is not None and "machine busy, spread" in reason
