"""Calibration profiles: round trip, validation, and where rates come from when a machine has none."""

import json

import pytest

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, load_profile
from ridgeplan.roofline.catalog.profile_lookup import profile_for, shipped_profiles


def test_round_trip(h200_profile):
    again = Profile.from_json(h200_profile.to_json())
    assert again == h200_profile
    assert again.to_json() == h200_profile.to_json()


def edited(profile, path, value):
    data = json.loads(profile.to_json())
    *parents, last = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 3, "schema 3 is newer than this version reads; allowed: up to 2"),
        ("schema", 1, "schema 1 is of an older version; make it again with `ridgeplan calibrate`"),
        ("schema", 0, "schema is 0; allowed: 2"),
        ("schema", True, "schema is True; allowed: 2"),
        ("schema", None, "schema is None; allowed: 2"),
        (
            "classes.linear.bandwidth_utilization",
            40,
            "classes.linear.bandwidth_utilization is 40; allowed: a number from 1e-09 to 4",
        ),
        ("classes.linear.launch_s", -1, "launch_s is -1"),
        ("classes.linear.source", "guess", "source is 'guess'; allowed: measured"),
        ("classes.linear.colour", 1, "classes.linear.colour is not a field; allowed: bandwidth_utilization"),
        ("classes", 3, "classes is 3; allowed: an object"),
        ("classes", [], r"classes is \[\]; allowed: an object"),
        ("hardware.memory_bytes", -5, "hardware.memory_bytes is -5; allowed: a whole number from"),
        ("hardware", None, "hardware is missing; make it again with `ridgeplan calibrate`"),
        ("pass_dispatch_s", None, "pass_dispatch_s is missing"),
        ("hardware.sources", {}, "hardware: hardware 'h200': sources must say where these come from: memory_bytes"),
        ("acceptance", [{"draft": []}], r"acceptance\[0\].draft is \[\]; allowed: a text or a finite number"),
        ("asynchronous", 3, "asynchronous is 3; allowed: true or false"),
        ("pass_dispatch_s", "x", "pass_dispatch_s is 'x'; allowed: a number from 0 to 10"),
    ],
)
def test_damage_is_named(h200_profile, path, value, message):
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(edited(h200_profile, path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", '{"schema": NaN}', b"\xff"])
def test_text_that_is_no_profile(text):
    with pytest.raises(ProfileError):
        Profile.from_json(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"nothing\.json"):
        load_profile(tmp_path / "nothing.json")


def test_a_class_without_rates_borrows_from_its_relative_and_says_so(h200_profile):
    from dataclasses import replace

    few = replace(h200_profile, classes={"linear": h200_profile.classes["linear"]})
    borrowed = few.rates("attention_int8")
    assert borrowed.source == "prior"
    assert borrowed.spread > few.classes["linear"].spread
    with pytest.raises(ProfileError, match="no rates for 'rope' or a related class"):
        few.rates("rope")


def test_another_machine_takes_the_nearest_profile_and_says_so(h200_profile):
    own = profile_for(load_hardware("h200"), (h200_profile,))
    other = profile_for(load_hardware("a100"), (h200_profile,))
    assert own is h200_profile
    assert (other.source, other.transferred_from) == ("transferred", h200_profile.device)
    assert other.rates("linear").source == "transferred"
    assert other.rates("linear").spread > own.rates("linear").spread
    assert other.hardware.name == "a100-80gb"


def test_without_any_profile_there_is_no_prediction():
    with pytest.raises(ProfileError, match="ridgeplan calibrate"):
        profile_for(load_hardware("h200"), ())


def test_shipped_profiles_are_valid_and_calibrated():
    for profile in shipped_profiles():
        assert profile.source == "calibrated"
        assert profile.date
        assert profile.software
