"""Several writers of one results file at once: nothing that any of them saved is lost."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import HEAVY_FUZZ

from ridgeplan.dashboards.cli import acceptance, quality
from ridgeplan.dashboards.files import locked
from ridgeplan.planner.acceptance import AcceptanceRow, load_rows
from ridgeplan.planner.quality import QualityRow
from ridgeplan.planner.quality import load_rows as load_quality
from ridgeplan.roofline.catalog.profile import Profile, Rates, load_profile, save_profile
from ridgeplan.validate.calibration.calibrate import CalibrationError, merge_recalibrated

LIMIT_S = 300  # far beyond what a writer takes, also on a busy machine
# By writer, the numbers of what it saves in turn; writers may save the same.
WRITERS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=2, max_size=8)


def acceptance_row(context: int) -> AcceptanceRow:
    return AcceptanceRow("w4", "tiny", 0.1, context, 0.5, "measured", "a test", quantizer="nearest-64")


def quality_row(context: int) -> QualityRow:
    return QualityRow("tiny", "int8", {"kv.target_bits": 8}, context, "fidelity", 0.9, 1.0, 1, 1, 0, "float32", "here",
                      "2026-11-24", "a text")  # fmt: skip


def at_once(writers: Iterable[Callable[[], Any]]) -> None:
    """Runs all in threads that begin together. A lock is of an open file, so threads wait as processes do."""
    jobs = list(writers)
    start = Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> None:
        start.wait()
        job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for result in [pool.submit(run, job) for job in jobs]:
            result.result()


@HEAVY_FUZZ
@given(writers=WRITERS)
def test_rows_of_acceptance_and_quality_are_all_there(tmp_path_factory: pytest.TempPathFactory, writers: Any) -> None:
    accepted, scored = (tmp_path_factory.mktemp(name) / "rows.json" for name in ("acceptance", "quality"))
    expected = {context for contexts in writers for context in contexts}

    def save(contexts: list[int]) -> None:
        for context in contexts:
            acceptance.save_rows(accepted, [acceptance_row(context)])
            quality.save_rows(scored, [quality_row(context)])

    at_once([lambda contexts=contexts: save(contexts) for contexts in writers])
    for rows in (load_rows(accepted), load_quality(scored)):
        assert sorted(row.context for row in rows) == sorted(expected)
    assert len(json.loads(accepted.read_text())["commands"]) == sum(map(len, writers))


@HEAVY_FUZZ
@given(writers=WRITERS)
def test_classes_that_were_measured_again_are_all_there(
    tmp_path_factory: pytest.TempPathFactory, h200_profile: Profile, writers: Any
) -> None:
    path, kinds = tmp_path_factory.mktemp("profile") / "profile.json", sorted(h200_profile.classes)
    save_profile(h200_profile, path)
    again = Rates(0.5, 0.5, 1e-6, 0.01)

    def recalibrate(numbers: list[int]) -> None:
        base = load_profile(path)  # before measuring
        measured = replace(base, classes={**base.classes, **{kinds[number]: again for number in numbers}})
        with locked(path):
            save_profile(merge_recalibrated(load_profile(path), base, measured), path)

    at_once([lambda numbers=numbers: recalibrate(numbers) for numbers in writers])
    measured = {kinds[number] for numbers in writers for number in numbers}
    assert {kind for kind, rates in load_profile(path).classes.items() if rates == again} == measured


def test_classes_are_not_merged_into_a_profile_of_other_ceilings(h200_profile: Profile) -> None:
    hardware = replace(h200_profile.hardware, bandwidth_bytes_per_s=1e12)
    with pytest.raises(CalibrationError, match="calibrated whole meanwhile"):
        merge_recalibrated(replace(h200_profile, hardware=hardware), h200_profile, h200_profile)


# Adds eight rows to the file of acceptance; a test's module would import torch, which takes seconds.
WRITER = """
import json, sys
from pathlib import Path
from ridgeplan.dashboards.cli.acceptance import save_rows
from ridgeplan.planner.acceptance import AcceptanceRow
fields = json.loads(sys.argv[2])
for context in range(fields["context"], fields["context"] + 8):
    save_rows(Path(sys.argv[1]), [AcceptanceRow(**{**fields, "context": context})])
"""


def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), json.dumps(vars(acceptance_row(1 + 8 * index)))],
            stderr=subprocess.PIPE, text=True,
        )
        for index in range(4)
    ]  # fmt: skip
    errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert sorted(row.context for row in load_rows(path)) == list(range(1, 33))
