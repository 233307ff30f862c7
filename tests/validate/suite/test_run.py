"""The whole suite at tiny sizes on the CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan.planner.search import Family, families
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.calibration.noise import NoisyMachine
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.kernel_calls.attention import Heads
from ridgeplan.validate.random_model import RandomModel, llama_like_shape
from ridgeplan.validate.suite import run as module
from ridgeplan.validate.suite.report import SuiteError, SuiteReport
from ridgeplan.validate.suite.run import SuiteOptions, heading, run_suite
from ridgeplan.validate.suite.sizes import OutputCase, SuiteSizes, sizes_for

SHAPE = llama_like_shape(1, 64, 96, 4, 2, 32)
SIZES = SuiteSizes(
    kernels=replace(
        sizes_for("smoke", "cpu").kernels, pool_bytes=8 << 20, trial_s=0.002, linear_shapes=((64, 64),),
        linear_rows=(1,), quantized_rows=(1,), head_shapes=((512, 64),), head_rows=(1,), heads=(Heads(2, 1, 64),),
        batches=(1,), tokens=(64,), queries=(1,), prefill_shapes=((64, 64),), prefill_rows=(64,), prefill_tokens=(64,),
        quantize_tokens=(128,), gather_rows=(16,), elementwise=(SHAPE,), elementwise_rows=(1,),
    ),
    models=(SHAPE,),
    steps=(DecodeCase("autoregressive", 300, 1), DecodeCase("quantspec", 300, 1, 2), DecodeCase("int8", 200_000, 4096)),
    regret=((300, 1),),
    candidates=1,
    generations=(DecodeCase("autoregressive", 200, 1),),
    new_tokens=8,
    outputs_shape=SHAPE.name,
    outputs=(OutputCase("quest", 300, 200, 2), OutputCase("quest", 200_000, 200_000, 4096)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on the machine."""
    for place in ("comparison", "random_model"):
        monkeypatch.setattr(f"ridgeplan.validate.{place}.is_busy", lambda spread: False)


def test_all_sections_end_up_in_one_report(
    tiny_folder: Path, h200_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corners(*space: Any, **options: Any) -> list[Family]:
        """Of the grids of some families: all of their thousands of plans take longer than all else here."""
        some = [*families(*space, **options)][::10]
        return [replace(each, gammas=each.gammas[:2], ratios=each.ratios[:1]) for each in some]

    monkeypatch.setattr(module.sections, "families", corners)
    messages: list[str] = []
    options = SuiteOptions("smoke", (), h200_profile, (str(tiny_folder),))
    kept: list[SuiteReport] = []
    report = run_suite(options, lambda what, done, total: messages.append(what), SIZES, kept.append)
    assert report.sections == ("kernels", "steps", "outputs", "generations", "regret")
    assert kept[-1] == report
    assert sorted(kept, key=lambda each: len(each.rows)) == kept
    kinds = {row.section: {other.kind for other in report.rows if other.section == row.section} for row in report.rows}
    assert kinds["steps"] == {"plain step", "draft step", "verification"}
    assert "TPOT at the measured acceptance" in kinds["generations"]
    assert {"linear", "linear_int4", "attention_d64", "sampling", "prefill_attention_d64"} <= kinds["kernels"]
    assert len(report.regret) == 1
    row = report.regret[0]
    measured = [candidate["measured_ms"] for candidate in row.candidates]
    assert row.best_ms == min(measured)
    assert row.recommended_ms in measured
    assert [line for line in report.skipped if "does not fit into memory" in line] == list(report.skipped)
    assert len(report.skipped) == 2
    (output,) = (row for row in report.rows if row.section == "outputs")
    assert output.case == "quest, 300 in 200 out, batch 2"
    assert SuiteReport.from_json(report.to_json()) == report
    assert messages


def test_steps_of_an_output_hold_its_prompt_and_what_was_generated(
    h200_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of each half; the mean is linear in the length, as is what a step reads."""
    caches = []

    def measured(model: Any, plan: Any, cache: Any) -> SimpleNamespace:
        caches.append(cache)
        return SimpleNamespace(total_s=float(cache.lengths[0]))

    monkeypatch.setattr(module.sections, "measured_round", measured)
    model = RandomModel.build(SHAPE, torch.device("cpu"), Machine.of(h200_profile))
    row = module.sections.output_row(OutputCase("quest", 300, 200, 2).plan(SHAPE, h200_profile), model, h200_profile)
    assert [(cache.prompt_tokens.tolist(), cache.lengths.tolist()) for cache in caches] == [
        ([300, 300], [350, 350]),
        ([300, 300], [450, 450]),
    ]
    assert row.measured == 1e3 * 400
    assert row.predicted > 0


def test_only_the_chosen_sections_run(h200_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        pytest.fail("it was not chosen")

    monkeypatch.setattr(module.sections, "kernel_rows", refused)
    monkeypatch.setattr(module.sections, "regret_row", refused)
    monkeypatch.setattr(module.generations, "Texts", refused)
    report = run_suite(SuiteOptions("smoke", ("steps",), h200_profile), sizes=SIZES)
    assert report.sections == ("steps",)
    assert {row.section for row in report.rows} == {"steps"}


def test_a_suite_that_measures_nothing_is_an_error(h200_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SuiteOptions("smoke", ("steps",), h200_profile)
    with pytest.raises(SuiteError, match=r"^nothing was measured: .*does not fit into memory; allowed: other parts"):
        run_suite(options, sizes=replace(SIZES, steps=SIZES.steps[2:]))
    with pytest.raises(SuiteError, match="nothing was measured: the suite has no cases of steps; allowed"):
        run_suite(options, sizes=replace(SIZES, steps=()))
    monkeypatch.setattr("ridgeplan.validate.random_model.is_busy", lambda spread: True)
    with pytest.raises(
        NoisyMachine, match=r"^nothing was measured: .*machine busy.*; allowed: a machine without other"
    ):
        run_suite(options, sizes=replace(SIZES, steps=SIZES.steps[:1]))


def test_the_heading_says_what_predicts(h200_profile: Profile) -> None:
    profile = heading(SuiteOptions("full", ("kernels",), replace(h200_profile, transferred_from="another GPU")))
    assert profile.profile == "h200: calibrated on test H200, 2026-01-01, rates of another GPU"
    assert profile.rows == ()
    assert set(profile.software) == {"torch", "ridgeplan"}
