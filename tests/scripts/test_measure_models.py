"""Stored rounds of models at true size: the predictions beside them are those of the shipped profile."""

import json
from pathlib import Path

import pytest
from measure_models import MODELS, predict_again

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.roofline.plan.plan import Plan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "validate" / "results" / "models_h200.json"
SHIPPED = ROOT / "roofline" / "catalog" / "profiles" / "nvidia-h200.json"


@pytest.mark.parametrize("name", MODELS)
def test_stored_rounds_are_predicted_by_the_shipped_profile(name):
    """Rounds, as the tokens that drafts yield change with the regression of acceptance."""
    shipped = load_profile(SHIPPED)
    for row in json.loads(RESULTS.read_text())[name]:
        predicted = predict(Plan.from_dict(row["given"]), load_shape(name), shipped)
        stored_ms = row["predicted_tpot_ms"] * row["tokens_per_round"]
        assert predicted.best.tpot_ms * predicted.tokens_per_round == pytest.approx(stored_ms, rel=1e-4), row["row"]


def test_rows_without_a_plan_stay_as_they_are_and_are_named(tmp_path, capsys):
    measured = json.loads(RESULTS.read_text())["microsoft/phi-4"][0]
    kept = {key: value for key, value in measured.items() if key != "given"} | {"predicted_tpot_ms": 1.0}
    failed = {"row": "32768 x 8, plain", "error": "out of memory"}
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"microsoft/phi-4": [kept, failed]}))
    predict_again(path, load_profile(SHIPPED))
    assert json.loads(path.read_text())["microsoft/phi-4"] == [kept, failed]
    said = capsys.readouterr().out
    assert "microsoft/phi-4, 32768 x 1, plain: not predicted" in said and "32768 x 8, plain: not predicted" in said
