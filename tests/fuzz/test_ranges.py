"""Within the ranges of its fields every machine, model and workload has a finite prediction."""

import math
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from mutations import FUZZ

from ridgeplan import planner
from ridgeplan.roofline.catalog.hardware import Hardware, load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, Rates, profile_for, shipped_profiles
from ridgeplan.roofline.catalog.validation import InvalidField
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.policy import PlanError
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import missing_cost_model

H200 = load_hardware("h200")
SHAPES = [load_shape(name) for name in ("Llama-3.1-8B", "DeepSeek-V3", "gpt-oss-20b", "Qwen3-30B-A3B")]


def ends(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three of a dataclass's numbers, each at an end of its range."""
    ranges = {
        item.name: numbers(check() if callable(check := item.metadata.get("check")) else check) for item in fields(kind)
    }
    ends_by_name = {name: st.sampled_from(pair) for name, pair in ranges.items() if pair}
    some = st.lists(st.sampled_from(sorted(ends_by_name)), max_size=3, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: ends_by_name[name] for name in names}))


def numbers(schema: Any) -> tuple[Any, Any] | None:
    """The ends of the range that a field's schema allows; None for fields that are no numbers."""
    while schema and "ge" not in schema:
        schema = schema.get("schema")
    return (schema["ge"], schema["le"]) if schema else None


@FUZZ
@given(ends(Hardware), ends(ModelShape), ends(Workload), ends(Rates), st.sampled_from(SHAPES), st.data())
def test_predictions_at_the_ends_of_all_ranges_are_finite(
    figures: dict[str, Any],
    sizes: dict[str, Any],
    question: dict[str, Any],
    rates: dict[str, Any],
    shape: ModelShape,
    data: st.DataObject,
) -> None:
    try:  # contradictions between fields are refused
        shape = replace(shape, **{**sizes, "window_layers": 1} if "window_tokens" in sizes else sizes)
        workload = Workload(**{"model": "m", "hardware": "other", "context": 4096, **question, "yarn_factor": 1.0})
    except (InvalidField, PlanError):
        assume(False)
    hardware = replace(H200, name="other", **figures)
    profile = profile_with(rates, hardware)
    plans = [preset(name, workload) for name in sorted(PRESETS)]
    plan = data.draw(st.sampled_from([plan for plan in plans if missing_cost_model(plan, shape) is None]))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        predicted = planner.predict(plan, shape, profile)
    for values in (predicted.best, predicted.low, predicted.high):
        assert all(math.isfinite(value) and value > 0 for value in asdict(values).values())


def profile_with(rates: dict[str, Any], hardware: Hardware) -> Profile:
    """The shipped profile with some rates replaced, transferred to other hardware."""
    [profile] = shipped_profiles()
    classes = {name: replace(class_rates, **rates) for name, class_rates in profile.classes.items()}
    return profile_for(hardware, (replace(profile, classes=classes),))
