"""Plan files hold what no catalog knows, so that they load again where they were not made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner import Plan, PlanError, predict, preset, resolve, workload_for
from ridgeplan.planner.plan_file import plan_json, read_plan
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, Rates, profile_for, shipped_profiles
from ridgeplan.roofline.plan.support import Backend

LLAMA = load_shape("meta-llama/Llama-3.1-8B")
OWN_SHAPE = replace(LLAMA, name="my-model", layers=20)


def saved(shape: ModelShape, profile: Profile) -> str:
    return plan_json(preset("quantspec", workload_for(shape, profile, 8192, 256, 2, yarn=False)), shape, profile)


def own_machine() -> Profile:
    """A CPU that nobody ships a profile of."""
    hardware = replace(load_hardware("h200"), name="cpu-of-mine", kind="cpu", compute_flops=2e12)
    return Profile(hardware, "mine", {"torch": "none"}, "2026-11-22", {"linear": Rates(0.5, 0.5, 1e-6, 0.05),
                   "elementwise": Rates(0.4, 0.4, 1e-6, 0.05)}, asynchronous=False)  # fmt: skip


def test_what_the_catalogs_know_is_not_repeated() -> None:
    _, profile = resolve(LLAMA, "h100")
    text = saved(LLAMA, profile)
    assert "specs" not in json.loads(text)
    assert read_plan(text).plan == Plan.from_json(text)
    assert read_plan(text).resolve() == (LLAMA, profile)


def test_a_file_names_the_engine_that_its_plan_was_chosen_for() -> None:
    _, profile = resolve(LLAMA, "h200")
    plan = preset("int8", workload_for(LLAMA, profile, 8192, 256, 2, yarn=False))
    text = plan_json(plan, LLAMA, profile, Backend.VLLM)
    assert read_plan(text).backend is Backend.VLLM and read_plan(text).to_json() == text
    assert read_plan(plan_json(plan, LLAMA, profile)).backend is Backend.RIDGEPLAN
    for wrong in ("tgi", 3, ["vllm"]):
        document = json.loads(text) | {"specs": {"backend": wrong}}
        with pytest.raises(PlanError, match=r"specs: backend is .*; allowed: any, ridgeplan, vllm"):
            read_plan(json.dumps(document))


@pytest.mark.parametrize("shape", [LLAMA, OWN_SHAPE], ids=lambda shape: shape.name)
@pytest.mark.parametrize("machine", ["a toml", "this machine"])
def test_a_plan_is_predicted_alike_wherever_it_is_loaded(shape: ModelShape, machine: str) -> None:
    """With no catalog entry, no TOML file and no calibration that the loading machine would have."""
    machine_file = replace(load_hardware("h100"), name="mine", bandwidth_bytes_per_s=2e12)
    profile = profile_for(machine_file, shipped_profiles()) if machine == "a toml" else own_machine()
    saved_plan = read_plan(saved(shape, profile))
    loaded_shape, loaded_profile = saved_plan.resolve()
    assert (loaded_shape, loaded_profile) == (shape, profile)
    original = preset("quantspec", workload_for(shape, profile, 8192, 256, 2, yarn=False))
    assert predict(saved_plan.plan, loaded_shape, loaded_profile) == predict(original, shape, profile)


def test_a_users_figures_under_a_known_name_are_kept() -> None:
    slower = replace(load_hardware("h200"), bandwidth_bytes_per_s=1e12)
    saved_plan = read_plan(saved(LLAMA, profile_for(slower, shipped_profiles())))
    assert saved_plan.resolve()[1].hardware.bandwidth_bytes_per_s == 1e12


def test_another_gpu_or_model_takes_the_place_of_the_specs() -> None:
    saved_plan = read_plan(saved(OWN_SHAPE, own_machine()))
    shape, profile = saved_plan.resolve(model="meta-llama/Llama-3.1-8B", gpu="h100")
    assert (shape, profile.hardware.name) == (LLAMA, "h100-sxm")
    assert saved_plan.on(shape, profile).workload.model == LLAMA.name


def test_acceptance_that_a_user_measured_stays_with_the_user() -> None:
    row = {"draft": "w4", "model": "m", "parameters": 1.0, "context": 4096, "acceptance": 0.9, "source": "measured",
           "where": "here"}  # fmt: skip
    text = saved(OWN_SHAPE, replace(own_machine(), acceptance=(row,)))
    assert json.loads(text)["specs"]["profile"]["acceptance"] == []


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "specs is []; allowed: an object with model and profile"),
        ({"gpu": {}}, "allowed: an object with model and profile"),
        ({"model": {"name": "m"}}, "specs: "),
        ({"model": 3}, "specs: "),
        ({"profile": {"schema": 3}}, "specs: hardware, device"),
        ({"profile": {"schema": 99}}, "schema 99 is newer"),
    ],
)
def test_damaged_specs_are_refused(specs: Any, words: str) -> None:
    document = json.loads(saved(LLAMA, resolve(LLAMA, "h200")[1])) | {"specs": specs}
    with pytest.raises(PlanError) as refusal:
        read_plan(json.dumps(document))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_plans_of_before_are_read(tmp_path: Path) -> None:
    """Files of `Plan.to_json`, which have no specs."""
    plan = preset("quantspec", workload_for(LLAMA, resolve(LLAMA, "h200")[1], 8192, 256, 2, yarn=False))
    saved_plan = read_plan(plan.to_json())
    assert (saved_plan.plan, saved_plan.shape, saved_plan.profile) == (plan, None, None)
