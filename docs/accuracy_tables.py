"""Measurements of the suites and of decoding beside their predictions, the largest errors first."""

from __future__ import annotations

from dataclasses import dataclass

from readme_tables import RESULTS, decoding_files, result, table

from ridgeplan.dashboards.cli.output import number
from ridgeplan.validate.suite.report import SuiteReport

SUITES = ("suite_h200", "suite_h100_steps")
BANDS = (0.05, 0.1, 0.2)  # errors up to which rows are counted


@dataclass(frozen=True)
class Pair:
    """A figure's prediction and measurement. file: where both are stored."""

    figure: str
    device: str
    model: str
    case: str
    unit: str
    predicted: float
    measured: float
    file: str

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


def accuracy() -> str:
    """How many pairs of each figure are within the bands, by device; then all pairs."""
    pairs = sorted((pair for pair in _pairs() if pair.measured), key=lambda pair: -abs(pair.error))
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.device, pair.figure), []).append(pair)
    counts = [
        (device, figure, str(len(rows)), *(f"{sum(abs(row.error) <= band for row in rows) / len(rows):.0%}"
         for band in BANDS), f"{rows[0].error:+.1%}")
        for (device, figure), rows in sorted(groups.items())
    ]  # fmt: skip
    rows = [
        (f"{pair.error:+.1%}", pair.figure, pair.device, pair.model, pair.case, pair.unit, number(pair.predicted),
         number(pair.measured), f"`{pair.file}`")
        for pair in pairs
    ]  # fmt: skip
    columns = ("device", "figure", "rows", *(f"within {band:.0%}" for band in BANDS), "worst")
    every = ("error", "figure", "device", "model", "case", "unit", "predicted", "measured", "file")
    return f"{table(columns, counts)}\n\n## Every row, the largest error first\n\n{table(every, rows)}"


def _pairs() -> list[Pair]:
    """Of the suites, and of the files of `ridgeplan bench suite`."""
    pairs = []
    for name in SUITES:
        report = SuiteReport.read(RESULTS / f"{name}.json")
        pairs += [
            Pair(
                row.kind,
                _short(report.device),
                _model(row.model),
                row.case,
                row.unit,
                row.predicted,
                row.measured,
                name,
            )
            for row in report.rows
        ]
    for name in decoding_files():
        document = result(name)
        for row in document["rows"]:
            case = f"{row['preset']}, gamma {row['gamma']}, {row['context']} tokens, batch {row['batch']}"
            pairs += [
                Pair(figure["name"], _short(document["device"]), _model(document["shape"]), case, figure["unit"],
                     figure["predicted"], figure["measured"], name)
                for figure in row["comparison"]
            ]  # fmt: skip
    return pairs


def _model(name: str) -> str:
    return str(name).rpartition("/")[2]


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ")
