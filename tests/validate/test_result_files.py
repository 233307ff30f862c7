"""Every shipped file of results: its times hold what happened in them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "validate" / "results"
COUNTED_SINCE = "2026-11-28"  # from when on decode_s has all of a round's time on the device
MEDIANS = 0.01  # by which passes at their medians may differ from their sum
# Measured earlier on that day: about a round of each segment is missing. Their plans are fixed, so that the time per
# token is that of the median segment.
NOT_COUNTED = {
    "decode_gammas_h200 rows",
    "decode_recommended_h200 rows",
    "suite_specattn_h200 rows",
}


def device_s(figures: Mapping[str, Any]) -> float:
    """Seconds of a generation's rounds by their phases: passes at their medians, flushes, and waits between rounds.

    figures: a row's "measured". `decode_s` of a row is not less, unless time on the device was not counted.
    """
    rounds, rows = figures["rounds"], figures["sequence_rounds"] / figures["rounds"]
    drafts_s = figures["draft_passes"] / rows * figures["draft_s"]
    verified_s = rounds * (figures.get("propose_s", 0.0) + figures["verify_s"])
    return drafts_s + verified_s + figures["flush_s"] + figures["idle_s"]


def too_short(values: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Of every generation with phases, its file and section, and whether it took less time than they did.

    Not where rounds adapt: their verifications have several widths, whose median may be far from their mean.
    """
    for section, rows in values.items():
        for row in rows if isinstance(rows, list) else ():
            figures = row.get("measured") if isinstance(row, dict) else None
            if isinstance(figures, dict) and "draft_passes" in figures and "adaptive" not in row.get("row", ""):
                yield f"{name} {section}", figures["decode_s"] < (1 - MEDIANS) * device_s(figures)


def test_decoding_takes_at_least_as_long_as_its_phases() -> None:
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    recent = {
        name: values for name, values in documents.items()
        if isinstance(values, dict) and values.get("date", "") >= COUNTED_SINCE
    }  # fmt: skip
    checked = [each for name, values in recent.items() for each in too_short(values, name)]
    assert len({section for section, _ in checked}) > len(NOT_COUNTED)
    assert {section for section, short in checked if short} == NOT_COUNTED
