"""From names to shapes, profiles and workloads."""

from dataclasses import asdict, replace

import pytest

from ridgeplan.planner import recommend
from ridgeplan.planner.acceptance import AcceptanceRow, rows_json
from ridgeplan.planner.resolution import longest_context, resolve, within_context, workload_for
from ridgeplan.roofline.catalog.files import NoHomeFolder
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, shipped_profiles
from ridgeplan.roofline.plan.plan import PlanError, Workload

QWEN = load_shape("Qwen2.5-0.5B")  # 32768 positions


@pytest.mark.parametrize(
    "context, new_tokens, factor",
    [
        (32000, 768, 1.0),  # 32768 tokens in all
        (32000, 769, 1.5),  # one more than it has positions, generated ones included
        (40000, 9152, 1.5),  # 49152 is 1.5 x 32768
        (40000, 9153, 2.0),
        (120_000, 1024, 4.0),
    ],
)
def test_yarn_stretches_in_halves_to_the_last_generated_token(h200_profile, context, new_tokens, factor):
    assert workload_for(QWEN, h200_profile, context, new_tokens, 1, yarn=True).yarn_factor == factor


def test_a_prompt_beyond_the_models_positions_is_refused_without_yarn(h200_profile):
    longest = workload_for(QWEN, h200_profile, 32768, 1024, 1, yarn=False)  # generation alone may pass the limit
    assert (longest.yarn_factor, longest.final_context) == (1, 33792)
    with pytest.raises(PlanError, match=r"context 32769 is beyond the limit of .*; allowed: up to 32k, .* `yarn=True`"):
        workload_for(QWEN, h200_profile, 32769, 1, 1, yarn=False)


def test_a_plans_own_yarn_reaches_its_context():
    stretched = Workload("m", "h200", 49152, yarn_factor=1.5)
    assert within_context(stretched, QWEN) is stretched
    with pytest.raises(PlanError, match=r"stretched 1\.5x by YaRN; allowed: up to 48k"):
        within_context(replace(stretched, context=49153), QWEN)


def test_the_longest_context_is_the_models_or_64_times_as_much():
    assert longest_context(QWEN, 1024, yarn=False) == 32768
    assert longest_context(QWEN, 1024, yarn=True) == 64 * 32768 - 1024
    assert longest_context(replace(QWEN, max_context=1 << 20), 1024, yarn=True) == 1 << 24


def test_a_workload_names_the_model_and_the_machine(h200_profile):
    workload = workload_for(QWEN, h200_profile, 1000, 10, 3, yarn=False)
    assert (workload.model, workload.hardware, workload.batch) == (QWEN.name, "h200", 3)


def test_yarn_reaches_64_times_the_positions(h200_profile):
    assert workload_for(QWEN, h200_profile, 64 * 32768 - 1, 1, 1, yarn=True).yarn_factor == 64
    with pytest.raises(PlanError, match=r"is 64\.5x the model's 32k; allowed: up to 64x with YaRN"):
        workload_for(QWEN, h200_profile, 64 * 32768, 1, 1, yarn=True)


def test_a_profile_of_ones_own_is_used_and_transferred_to_other_machines(h200_profile, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(h200_profile.to_json())
    for source in (h200_profile, path, str(path)):
        assert resolve(QWEN, "h200", source)[1] == h200_profile
    shape, other = resolve("Qwen2.5-0.5B", "a100", h200_profile)
    assert shape == QWEN
    assert (other.hardware.name, other.transferred_from) == ("a100-80gb", "test H200")
    assert resolve(QWEN, "h200")[1] == shipped_profiles()[0]


ROW = AcceptanceRow("kv4", "m", 1.0, 4096, 0.9, "measured", "here")


def test_rows_of_a_file_join_those_of_the_profile_and_replace_their_like(h200_profile, tmp_path):
    other = replace(ROW, draft="w4")
    profile = replace(h200_profile, acceptance=(asdict(ROW), asdict(other)))
    path = tmp_path / "rows.json"
    path.write_text(rows_json([replace(ROW, acceptance=0.8)], ["by hand"]))
    rows = resolve(QWEN, "h200", profile, path)[1].acceptance
    assert [(row["draft"], row["acceptance"]) for row in rows] == [("kv4", 0.8), ("w4", 0.9)]
    assert resolve(QWEN, "h200", profile)[1] == profile


def test_saved_rows_are_used_unless_a_file_is_named(h200_profile, tmp_path, monkeypatch):
    saved, named = tmp_path / "saved.json", tmp_path / "named.json"
    monkeypatch.setattr("ridgeplan.planner.resolution.user_acceptance_path", lambda: saved)
    assert resolve(QWEN, "h200", h200_profile)[1].acceptance == ()
    saved.write_text(rows_json([ROW], ["saved"]))
    named.write_text(rows_json([replace(ROW, context=1)], ["named"]))
    assert resolve(QWEN, "h200", h200_profile)[1].acceptance == (asdict(ROW),)
    assert [row["context"] for row in resolve(QWEN, "h200", h200_profile, named)[1].acceptance] == [1]


def test_without_a_home_folder_there_are_no_saved_rows(h200_profile, monkeypatch):
    def homeless():
        raise NoHomeFolder("no home folder")

    monkeypatch.setattr("ridgeplan.planner.resolution.user_acceptance_path", homeless)
    assert resolve(QWEN, "h200", h200_profile)[1] == h200_profile


def test_auto_is_the_given_the_calibrated_or_the_detected_machine(h200_profile, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    assert resolve(QWEN, "auto", h200_profile)[1] == h200_profile
    with pytest.raises(ProfileError, match="this machine is neither calibrated nor in the catalog"):
        resolve(QWEN, "auto")
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: "h200")
    assert resolve(QWEN, "auto")[1] == shipped_profiles()[0]
    profile = replace(h200_profile, device="mine")
    (tmp_path / "ridgeplan").mkdir()
    (tmp_path / "ridgeplan" / "profile.json").write_text(profile.to_json())
    assert resolve(QWEN, "auto")[1] == profile


def test_an_answer_by_a_disturbed_calibration_says_so(h200_profile: Profile) -> None:
    wide = {kind: replace(rates, spread=0.6) for kind, rates in h200_profile.classes.items()}
    disturbed = replace(h200_profile, classes=wide)
    assert (disturbed.disturbed, h200_profile.disturbed) == (True, False)
    for profile in (disturbed, h200_profile):
        answer = recommend("meta-llama/Llama-3.1-8B", "h200", "8k", profile=profile)
        assert any("disturbed the calibration" in note for note in answer.notes) == profile.disturbed
