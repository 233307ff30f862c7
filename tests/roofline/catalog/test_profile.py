"""Calibration profiles: round trip, validation, and where rates come from when a machine has none."""

import json
from dataclasses import replace

import pytest

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import (
    NO_GAP,
    ROUTED_S,
    ROUTER_S,
    Profile,
    ProfileError,
    Rates,
    RowStep,
    load_profile,
    profile_for,
    shipped_profiles,
    user_profile_path,
)
from ridgeplan.roofline.catalog.profile import transferred as transferred_profile


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
        ("schema", None, "schema is missing, as ridgeplan did not write this document; allowed: 3"),
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


def test_experts_without_rates_are_as_fast_as_the_same_kernels_elsewhere(h200_profile):
    """Those of 16-bit experts are Triton's on Hopper, too, where dense products have faster ones."""
    fast, slow = (replace(h200_profile.classes["linear"], launch_s=launch_s) for launch_s in (1e-6, 2e-6))
    profile = replace(h200_profile, classes={"linear": fast, "linear_int4": fast}, portable={"linear": slow})
    assert profile.rates("grouped_linear").launch_s == pytest.approx(2e-6 + ROUTED_S)
    dense = profile.rates("linear_int4").launch_s
    assert profile.rates("grouped_linear_int4").launch_s == pytest.approx(dense + ROUTED_S) and dense == 1e-6
    measured = replace(profile, classes={**profile.classes, "grouped_linear_int4": fast})
    assert measured.rates("grouped_linear_int4") == replace(fast, launch_s=1e-6 + ROUTER_S)


@pytest.mark.parametrize(
    ("kind", "relative"),
    [("linear_int8", "linear_int4"), ("attention_d64", "attention"), ("gather", "attention"), ("rope", "elementwise")],
)
def test_the_nearest_relative_comes_first(h200_profile, kind, relative):
    """`linear`, at the end of most chains, is there as well."""
    profile = {name: replace(h200_profile.classes["linear"], launch_s=launch_s) for name, launch_s in
           {"linear": 0.001, relative: 0.002}.items()}  # fmt: skip
    assert replace(h200_profile, classes=profile).rates(kind).launch_s == 0.002


def test_another_machine_takes_the_nearest_profile_and_says_so(h200_profile):
    profile = profile_for(load_hardware("h200"), (h200_profile,))
    other = profile_for(load_hardware("a100"), (h200_profile,))
    assert profile is h200_profile
    assert (other.source, other.transferred_from) == ("transferred", "test H200")
    assert other.rates("linear") == replace(profile.rates("linear"), spread=0.05 + 0.2, source="transferred")
    assert other.hardware == load_hardware("a100-80gb")


def test_a_known_name_with_other_figures_is_another_machine(h200_profile):
    half = replace(load_hardware("h200"), bandwidth_bytes_per_s=2.4e12)
    other = profile_for(half, (h200_profile,))
    assert (other.source, other.hardware) == ("transferred", half)


def test_another_name_with_the_same_figures_is_another_machine(h200_profile):
    other = replace(load_hardware("h200"), name="h200-of-another-maker")
    profile = profile_for(other, (h200_profile,))
    assert (profile.source, profile.hardware) == ("transferred", other)


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


# Rates on another machine, by hand: half the instruction rate, and a memory and a peak of other ratios.

STEPS = (
    RowStep(above_rows=8, launch_s=1e-6, inverse_utilization=1.0, tile_s=1e-7, fill_s=5e-7, width_s=1e-9),
    RowStep(above_rows=16, inverse_utilization=2.0),
)
CLASSES = {
    "linear": Rates(0.9, 0.8, 1e-6, 0.0),
    "attention": Rates(0.88, 0.4, 2e-6, 0.0),
    "attention_int4": Rates(0.3, 0.05, 3e-6, 0.0, steps=STEPS),
    "gap": replace(NO_GAP, launch_s=4e-6),
}
SOURCE = replace(
    load_hardware("h200"), num_sms=100, sm_clock_hz=2e9, bandwidth_bytes_per_s=4e12, compute_flops=1e15
)  # fmt: skip


@pytest.fixture
def transferred(h200_profile):
    """Rates on a machine with half the SMs, and memory and peak as given."""

    def to(portable=None, others=None, **figures):
        profile = replace(h200_profile, hardware=SOURCE, classes=CLASSES | (others or {}), portable=portable or {})
        return transferred_profile(profile, replace(SOURCE, name="other", num_sms=50, **figures)).classes

    return to


def test_transfers_to_the_host_keep_their_share_and_say_nothing_of_kernels(transferred):
    """Their share of a peak that they never use is 1, which is not what kernels can reach."""
    without = transferred(compute_flops=1e14)
    link = {"host_copy": Rates(0.9, 1.0, 2e-6, 0.0), "host_gather": Rates(0.3, 1.0, 2e-6, 0.0)}
    profile = transferred(others=link, compute_flops=1e14)
    assert {kind: profile[kind] for kind in without} == without
    assert [profile[kind].bandwidth_utilization for kind in link] == [0.9, 0.3]


def test_what_memory_or_the_peak_binds_keeps_its_share(transferred):
    rates = transferred(bandwidth_bytes_per_s=1e12, compute_flops=1e14)
    assert rates["linear"].bandwidth_utilization == pytest.approx(0.9)
    assert rates["linear"].compute_utilization == 0.8
    fast = transferred(bandwidth_bytes_per_s=16e12)
    assert fast["attention"].bandwidth_utilization == pytest.approx(0.88)


def test_what_lacks_to_the_best_stream_is_instructions(transferred):
    """0.88 of 4 TB/s are 3.52 TB/s; half the SMs would read 1.76 TB/s, more than the 0.9 TB/s that any reads."""
    assert transferred(bandwidth_bytes_per_s=1e12)["attention"].bandwidth_utilization == pytest.approx(0.9)


def test_what_instructions_bind_keeps_its_speed_per_sm_and_clock(transferred):
    """0.3 of 4 TB/s are 1.2 TB/s; half the SMs reach 0.6 of 1 TB/s. With the
    steps, (4 TB/s) / 4.333 / 2 = 0.46 TB/s and (4 TB/s) / 6.333 / 2 = 0.32 TB/s.
    """
    codes = transferred(bandwidth_bytes_per_s=1e12)["attention_int4"]
    assert codes.bandwidth_utilization == pytest.approx(0.6)
    step, next_step = codes.steps
    assert 1 / (1 / 0.6 + step.inverse_utilization) == pytest.approx(4 / (1 / 0.3 + 1) / 2)
    both = step.inverse_utilization + next_step.inverse_utilization
    assert 1 / (1 / 0.6 + both) == pytest.approx(4 / (1 / 0.3 + 3) / 2)
    assert step.width_s == pytest.approx(2e-9)
    assert (codes.launch_s, step.launch_s, step.fill_s) == (3e-6, 1e-6, 5e-7)


@pytest.mark.parametrize("clock_hz, seconds", [(2e9, 1e-7), (1e9, 2e-7)])
def test_a_tile_takes_an_sm_as_many_cycles(transferred, clock_hz, seconds):
    """However many SMs there are: each has its own tiles."""
    step = transferred(sm_clock_hz=clock_hz)["attention_int4"].steps[0]
    assert step.tile_s == pytest.approx(seconds)


def test_codes_stream_no_better_than_what_needs_no_unpacking(transferred):
    """At 0.4 TB/s, instructions would allow 1.5 of the bandwidth. A gap moves no bytes, so its 1.0 is no limit."""
    slow = transferred(bandwidth_bytes_per_s=4e11)
    assert slow["attention_int4"].bandwidth_utilization == pytest.approx(0.9)
    assert slow["gap"].launch_s == 4e-6
    assert slow["gap"].bandwidth_utilization == 1.0


def test_a_lower_peak_is_reached_to_a_larger_share(transferred):
    """0.05 and 0.4 of 1 PFLOP/s by half the SMs: a quarter of 0.1 PFLOP/s, and all that products reach of it."""
    rates = transferred(compute_flops=1e14)
    assert rates["attention_int4"].compute_utilization == pytest.approx(0.25)
    assert rates["attention"].compute_utilization == pytest.approx(0.8)


def test_a_higher_peak_is_reached_to_the_same_share(transferred):
    assert transferred(compute_flops=4e15)["attention"].compute_utilization == pytest.approx(0.4)


def test_machines_before_hopper_have_the_portable_kernels(transferred):
    portable = {"attention": Rates(0.86, 0.4, 9e-6, 0.0)}
    assert transferred(portable, compute_capability="8.6")["attention"].launch_s == 9e-6
    assert transferred(portable)["attention"].launch_s == 2e-6


def test_kernels_of_hopper_alone_say_nothing_of_older_machines(h200_profile):
    """8-bit weights run in Triton's kernel there, as 4-bit ones do; sparse drafts are not priced as measured."""
    portable = {"linear_int4": Rates(0.2, 0.2, 5e-6, 0.0)}
    profile = replace(h200_profile, hardware=SOURCE, portable=portable)
    old = replace(SOURCE, name="other", compute_capability="8.0")
    older, newer = (transferred_profile(profile, hardware) for hardware in (old, replace(SOURCE, name="other")))
    assert newer.rates("linear_int8").source == "transferred"
    assert older.rates("linear_int8").source == "prior"
    assert older.rates("linear_int8").bandwidth_utilization == older.rates("linear_int4").bandwidth_utilization
    assert "sparse_attention" in {*newer.classes} - {*older.classes}


@pytest.mark.parametrize("kind", ["two_bit_scan", "progressive_attention"])
def test_scans_run_on_older_machines_as_those_for_many_query_heads_do(h200_profile, kind):
    """These are Triton's kernels on Hopper, too."""
    wide = replace(h200_profile.rates(kind), bandwidth_utilization=0.125, launch_s=5e-5, spread=0.0)
    profile = replace(
        h200_profile, hardware=SOURCE, portable={"linear": Rates(0.2, 0.2, 5e-6, 0.0)},
        classes={**h200_profile.classes, f"{kind}_wide": wide},
    )  # fmt: skip
    old = replace(SOURCE, name="other", compute_capability="8.0")
    rates = transferred_profile(profile, old).rates(kind)
    assert (rates.bandwidth_utilization, rates.launch_s, rates.source) == (0.125, 5e-5, "transferred")
    without = replace(
        profile, classes={name: rates for name, rates in profile.classes.items() if name != f"{kind}_wide"}
    )
    assert transferred_profile(without, old).rates(kind).source == "prior"


def test_without_a_clock_instructions_scale_as_the_peaks(transferred):
    """A tenth of the peak: 0.3 of 4 TB/s become 0.12 TB/s."""
    codes = transferred(sm_clock_hz=0.0, compute_flops=1e14)["attention_int4"]
    assert codes.bandwidth_utilization == pytest.approx(0.03)


def test_rates_stay_in_the_range_of_profiles(transferred):
    """A machine whose instructions are a billion times slower, as far as a file may describe one."""
    slow = transferred(sm_clock_hz=1e-3)
    assert slow["attention_int4"].bandwidth_utilization == pytest.approx(1e-9)
    assert all(step.inverse_utilization <= 1e9 for step in slow["attention_int4"].steps)


def test_codes_stream_no_more_than_the_bandwidth_elsewhere(transferred):
    """Here a cache serves products, which reach 1.2 of the bandwidth; that of another machine may not."""
    products = replace(CLASSES["attention"], bandwidth_utilization=1.2)
    slow = transferred(others={"attention": products}, bandwidth_bytes_per_s=1e10)
    assert slow["attention"].bandwidth_utilization == pytest.approx(1.2)
    assert slow["attention_int4"].bandwidth_utilization == pytest.approx(1.0)
