"""Calibration profiles: round trip, validation, and where rates come from when a machine has none."""

import json
from dataclasses import replace

import pytest

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Profile, ProfileError, load_profile
from ridgeplan.roofline.catalog.profile_lookup import profile_for, shipped_profiles, user_profile_path


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
        ("schema", 4, "schema 4 is newer than this version reads; allowed: up to 3"),
        ("schema", 1, "schema 1 is of an older version; make it again with `ridgeplan calibrate`"),
        ("schema", 0, "schema is 0; allowed: 3"),
        ("schema", True, "schema is True; allowed: 3"),
        ("schema", None, "schema is None; allowed: 3"),
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
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(text)
    assert "\n" not in str(caught.value)


def test_profiles_from_before_tiles_were_timed_load_without_their_times():
    """Files that were written before a class had `tile_s` and `fill_s` predict what they did."""
    (shipped,) = shipped_profiles()
    data = json.loads(shipped.to_json())
    timed = [data["classes"]["linear_int4"], *data["classes"]["linear_int4"]["steps"]]
    assert any(part["tile_s"] and part["fill_s"] for part in timed)
    for part in timed:
        del part["tile_s"], part["fill_s"]
    older = Profile.from_json(json.dumps(data)).classes["linear_int4"]
    assert {(part.tile_s, part.fill_s) for part in (older, *older.steps)} == {(0.0, 0.0)}
    assert older.bandwidth_utilization == shipped.classes["linear_int4"].bandwidth_utilization


def test_a_transferred_profile_round_trips_as_well(h200_profile):
    transferred = profile_for(load_hardware("a100"), (h200_profile,))
    assert Profile.from_json(transferred.to_json()) == transferred


def test_profiles_made_by_code_are_checked(h200_profile):
    with pytest.raises(ProfileError, match=r"^pass_dispatch_s is -1; allowed: a number from 0 to 10$"):
        replace(h200_profile, pass_dispatch_s=-1)
    with pytest.raises(ProfileError, match=r"^launch_s is nan; allowed: a number from 0 to 1$"):
        replace(h200_profile.classes["linear"], launch_s=float("nan"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"^cannot read profile '.*nothing\.json': No such file"):
        load_profile(tmp_path / "nothing.json")


def test_a_damaged_file_is_named(tmp_path, h200_profile):
    path = tmp_path / "damaged.json"
    path.write_text(edited(h200_profile, "schema", 1))
    with pytest.raises(ProfileError, match=r"^profile '.*damaged\.json': schema 1 is of an older version"):
        load_profile(path)
    path.write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(ProfileError, match=r"^profile '.*damaged\.json': it is larger than 16 MiB"):
        load_profile(path)


def test_a_class_without_rates_takes_its_relatives_and_says_so(h200_profile):
    linear = h200_profile.classes["linear"]
    few = replace(h200_profile, classes={"linear": linear})
    assert few.rates("linear") is few.classes["linear"]
    # attention_int8 -> attention_int4 -> attention -> linear
    assert few.rates("attention_int8") == replace(linear, spread=linear.spread + 0.2, source="prior")
    with pytest.raises(ProfileError, match="no rates for 'rope'"):
        few.rates("rope")


@pytest.mark.parametrize(
    ("kind", "relative"),
    [("linear_int8", "linear_int4"), ("attention_d64", "attention"), ("gather", "attention"), ("rope", "elementwise")],
)
def test_the_nearest_relative_comes_first(h200_profile, kind, relative):
    """`linear`, at the end of most chains, is there as well."""
    own = {name: replace(h200_profile.classes["linear"], launch_s=launch_s) for name, launch_s in
           {"linear": 0.001, relative: 0.002}.items()}  # fmt: skip
    assert replace(h200_profile, classes=own).rates(kind).launch_s == 0.002


def test_another_machine_takes_the_nearest_profile_and_says_so(h200_profile):
    own = profile_for(load_hardware("h200"), (h200_profile,))
    other = profile_for(load_hardware("a100"), (h200_profile,))
    assert own is h200_profile
    assert (other.source, other.transferred_from) == ("transferred", "test H200")
    assert other.rates("linear") == replace(own.rates("linear"), spread=0.05 + 0.2, source="transferred")
    assert other.hardware == load_hardware("a100-80gb")


def test_a_known_name_with_other_figures_is_another_machine(h200_profile):
    half = replace(load_hardware("h200"), bandwidth_bytes_per_s=2.4e12)
    other = profile_for(half, (h200_profile,))
    assert (other.source, other.hardware) == ("transferred", half)


def test_another_name_with_the_same_figures_is_another_machine(h200_profile):
    other = replace(load_hardware("h200"), name="h200-of-another-maker")
    found = profile_for(other, (h200_profile,))
    assert (found.source, found.hardware) == ("transferred", other)


def test_the_widest_band_stays_the_widest(h200_profile):
    widest = replace(h200_profile, classes={"linear": replace(h200_profile.classes["linear"], spread=10)})
    assert widest.rates("head").spread == 10
    assert profile_for(load_hardware("a100"), (widest,)).rates("linear").spread == 10


@pytest.mark.parametrize(
    ("machine", "nearest", "farther"),
    [
        # Octaves of ridge point (FLOP/byte) and bandwidth (TB/s) together. H100: 295 and 3.35.
        ("h100", "h200", "b200"),  # 206 and 4.8: 0.52 + 0.52; 281 and 8: 0.07 + 1.26, though its ridge point is nearer
        # A100: 153 and 2.04.
        ("a100", "h200", "h20"),  # 206 and 4.8: 0.43 + 1.24; 37 and 4: 2.05 + 0.97, though its bandwidth is nearer
        # B200: 281 and 8.
        ("b200", "h200", "l40s"),  # 0.45 + 0.74; 419 and 0.864: 0.57 + 3.21
    ],
)
def test_the_nearest_machine_is_that_of_the_fewest_octaves(h200_profile, machine, nearest, farther):
    near, far = (replace(h200_profile, hardware=load_hardware(name), device=name) for name in (nearest, farther))
    for calibrated in ((near, far), (far, near)):
        assert profile_for(load_hardware(machine), calibrated).transferred_from == nearest


def test_a_gpu_takes_no_rates_from_a_cpu(h200_profile):
    cpu = replace(h200_profile, hardware=replace(h200_profile.hardware, name="cpu-x", kind="cpu"), device="cpu")
    b200 = replace(h200_profile, hardware=load_hardware("b200"), device="b200")
    assert profile_for(load_hardware("h200"), (cpu, b200)).transferred_from == "b200"
    with pytest.raises(ProfileError, match="no calibrated profile of a gpu to predict h200 from"):
        profile_for(load_hardware("h200"), (cpu,))


def test_the_users_profile_is_in_the_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(user_profile_path()) == "/somewhere/ridgeplan/profile.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(user_profile_path()) == "/home/someone/.cache/ridgeplan/profile.json"


def test_without_any_profile_there_is_no_prediction():
    with pytest.raises(ProfileError, match="ridgeplan calibrate"):
        profile_for(load_hardware("h200"), ())


def test_shipped_profiles_are_valid_and_calibrated():
    for profile in shipped_profiles():
        assert profile.source == "calibrated"
        assert profile.date
        assert profile.software
