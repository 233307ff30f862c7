"""Every shipped file of results: its times hold what happened in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeplan.validate.result_file import device_s

RESULTS = Path(__file__).parents[2] / "validate" / "results"
COUNTED_SINCE = "2026-11-28"  # from when on decode_s has all of a round's time on the device
MEDIANS = 0.01  # by which passes at their medians may differ from their sum
# Measured earlier on that day: about a round of each segment is missing. Their plans are fixed, so that the time per
# token is that of the median segment, but for the adaptive rows of drafters_h200, which docs/drafters.md corrects.
NOT_COUNTED = {
    "decode_gammas_h200 rows", "decode_recommended_h200 rows", "suite_specattn_h200 rows",
    "drafters_h200 prose 4096x1", "drafters_h200 code 4096x1",
}  # fmt: skip


def generations(values: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of every generation with phases, by file and section."""
    for section, rows in values.items():
        if isinstance(rows, list):
            measured = (row["measured"] for row in rows if isinstance(row, dict) and row.get("measured"))
            yield from ((f"{name} {section}", figures) for figures in measured if "draft_passes" in figures)


def test_decoding_takes_at_least_as_long_as_its_phases() -> None:
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    recent = {
        name: values for name, values in documents.items()
        if isinstance(values, dict) and values.get("date", "") >= COUNTED_SINCE
    }  # fmt: skip
    shares: dict[str, list[float]] = {}
    for name, values in recent.items():
        for section, figures in generations(values, name):
            shares.setdefault(section, []).append(figures["decode_s"] / device_s(figures))
    assert len(shares) > len(NOT_COUNTED)
    assert {section for section, each in shares.items() if min(each) < 1 - MEDIANS} == NOT_COUNTED
