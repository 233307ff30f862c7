"""Measurements of suites, decoding and models at true size beside their predictions, the largest errors first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from readme_tables import RESULTS, decoding_files, result, table

from ridgeplan.dashboards.cli.output import number
from ridgeplan.validate.suite.report import SuiteReport

SUITES = ("suite_h200", "suite_kernels_h200", "suite_h100_steps")
MODELS = "models_h200"  # at true size
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
    """Of the suites, of the files of `ridgeplan bench suite`, and of models at true size."""
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
    return [*pairs, *_models()]


def _models() -> Iterator[Pair]:
    """Of models at true size: the time per token, at the predicted tokens of a round, and of a round's parts."""
    document = result(MODELS)
    device = _short(document["device"])
    for model, rows in document.items():
        for row in rows if "/" in model else ():
            if "round_ms" in row:
                parts = {kind: (part["predicted_ms"], part["ms"]) for kind, part in row["parts"].items()}
                for kind, times in {"tpot": (row["predicted_tpot_ms"], row["tpot_ms"]), **parts}.items():
                    yield Pair(f"{kind}, true size", device, _model(model), row["plan"], "ms", *times, MODELS)


def _model(name: str) -> str:
    return str(name).rpartition("/")[2]


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ")
