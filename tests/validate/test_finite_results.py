"""A model whose logits are NaN is refused in one line, whatever is measured, and no row holds what is no figure."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeplan import runtime
from ridgeplan.dashboards.files import FileProblem, json_text
from ridgeplan.planner.quality import QualityRow
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import PlanError, Workload
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.runtime import ModelError
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.validate.acceptance import Draft, Passage, measure_acceptance, measured_row
from ridgeplan.validate.measure import clamp_share
from ridgeplan.validate.studies.drafts import RoundCounts, StudyDraft, StudyRow

CONTEXT, NEW_TOKENS = 300, 8
REFUSED = r"^the model's (logits|activations) are NaN or infinite .*; allowed: weights and a dtype that keep"
HEAD_PRESETS = ("specontext", "specontext-resident")  # refused before, as no head is given


@pytest.fixture(scope="module", params=["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def overflowing(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of which one norm's finite weights make every logit NaN or infinite."""
    folder = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights[request.param] = torch.full_like(weights[request.param], 3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def load(
    name: str, folder: str, calibration: list[int] | None = None, profile: Profile | None = None
) -> runtime.Engine:
    plan = preset(name, Workload("tiny", "here", CONTEXT, NEW_TOKENS))
    return runtime.load(plan, folder, device="cpu", calibration=calibration, profile=profile)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in HEAD_PRESETS])
def test_every_preset_refuses_it_in_one_line(overflowing: str, name: str, h200_profile: Profile) -> None:
    with pytest.raises(ModelError, match=REFUSED):
        load(name, overflowing, profile=h200_profile).generate([list(range(256)) + [0] * (CONTEXT - 256)], NEW_TOKENS)


def test_nothing_is_fitted_to_it_nor_saved(overflowing: str, saved_weights_folder: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED):
        load("int8-weights", overflowing, list(range(256)) * 4)
    assert not list(saved_weights_folder.glob("*.safetensors"))


@pytest.mark.parametrize("calibration", [None, tuple(range(256)) * 4])
@pytest.mark.parametrize("draft", ["kv8", "w4kv4", "streamingllm:0.5"])
def test_acceptance_refuses_it(
    overflowing: str, long_text: str, draft: str, calibration: tuple[int, ...] | None
) -> None:
    passage = Passage(long_text, "topics", (260,), 8, calibration)
    with pytest.raises(ModelError, match=REFUSED):
        list(measure_acceptance(overflowing, passage, [Draft.parse(draft)], device="cpu"))


def test_teacher_forced_logits_are_refused(tiny_folder: Path) -> None:
    engine = load("autoregressive", str(tiny_folder))
    with torch.no_grad():
        engine.weights.norm.weight.mul_(0).add_(3e38)
    with pytest.raises(ModelError, match=REFUSED):
        engine.teacher_forced_logits([[1, 2, 3]], [[4, 5]])


@pytest.mark.parametrize(
    ("share", "clamped"), [(1 + 1e-6, 1.0), (1.0, 1.0), (0.5, 0.5), (-1e-9, 0.25), (0.0, 0.25), (0.1, 0.25)]
)
def test_only_rounding_is_clamped(share: float, clamped: float) -> None:
    assert clamp_share(share, 0.25) == clamped


ROWS: dict[str, Callable[[float], object]] = {
    "acceptance": lambda value: measured_row(
        "cpu", load_shape("Llama-3.1-8B"), "a text", 100, "here", acceptance=value, calibrated=False, draft="kv8"
    ),
    "study": lambda value: StudyRow.of(StudyDraft("quest", 0.1, "bf16"), 100, RoundCounts(1, (1,) * 7, (value,) * 7)),
    "quality": lambda value: replace(
        QualityRow("tiny", "int8", {}, 100, "fidelity", 1.0, 1.0, 1, 1, 0, "float32", "here", "2026-11-24", "a text"),
        value=clamp_share(value),
    ),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, -0.5])
@pytest.mark.parametrize("kind", ROWS)
def test_no_row_takes_what_is_no_share(kind: str, value: float) -> None:
    with pytest.raises((PlanError, WorkloadError), match=r"allowed: a number from"):
        ROWS[kind](value)


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_takes_a_share_that_rounding_took_past_one(kind: str) -> None:
    ROWS[kind](1 + 1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_document_takes_what_is_no_number(value: float) -> None:
    with pytest.raises(FileProblem, match="NaN or infinite, so it is not written"):
        json_text({"rows": [{"ms": value}]})
