"""What a calibration measured, as a file: rates can be fitted to it again, without measuring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.checks import Checked, build, number, parts, text, whole
from ridgeplan.roofline.catalog.documents import fields_of_schema, parse_json, read_document
from ridgeplan.roofline.catalog.mistakes import brief
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.passes import tiles
from ridgeplan.validate.calibration.fit import Ceilings, Sample

SCHEMA = 1
LARGEST = 1e18


class SamplesError(ValueError):
    """A file of samples that is missing, damaged, or of another machine."""


@dataclass(frozen=True)
class KernelSample(Checked):
    """One timed call of a kernel class; sizes as in `ridgeplan.validate.calibration.fit.Sample`."""

    error = SamplesError
    kind: str = text()
    seconds: float = number(1e-9, 1e3)
    flops: float = number(0, LARGEST)
    read_bytes: float = number(0, LARGEST)
    write_bytes: float = number(0, LARGEST)
    rows: int = whole(1, 1 << 30)
    width: float = number(0, LARGEST)
    depth: float = number(0, LARGEST)

    @classmethod
    def of(cls, kind: str, sample: Sample) -> KernelSample:
        """A sample of a class."""
        cost = {name: float(value) for name, value in vars(sample.cost).items()}
        return cls(kind, sample.seconds, **cost, rows=sample.rows, width=float(sample.width), depth=float(sample.depth))

    @property
    def sample(self) -> Sample:
        """As fits take it."""
        cost = Cost(self.flops, self.read_bytes, self.write_bytes)
        count = float(tiles(self.kind, self.width, self.depth))
        return Sample(cost, self.seconds, self.rows, self.width, self.depth, count)


@dataclass(frozen=True)
class RoundSample(Checked):
    """A timed round of a calibration's model (its place in `Suite.gap_shapes`), with medians of its parts.

    tokens: that the timed rounds added. draft_s: of one draft step, 0 without drafts; rest_s: of what is neither a
    draft step nor the target's.
    """

    error = SamplesError
    model: int = whole(0, 100)
    preset: str = text()
    context: int = whole(1, 1 << 24)
    batch: int = whole(1, 4096)
    tokens: int = whole(1, 1 << 24)
    draft_s: float = number(0, 1e3)
    target_s: float = number(0, 1e3)
    rest_s: float = number(0, 1e3)


@dataclass(frozen=True)
class Samples(Checked):
    """All samples of one calibration. The utilizations are those of `Ceilings`."""

    error = SamplesError
    device: str = text()
    date: str = text()
    matmul_utilization: float = number(1e-9, 4)
    read_utilization: float = number(1e-9, 4)
    kernels: tuple[KernelSample, ...] = parts(KernelSample)
    rounds: tuple[RoundSample, ...] = parts(RoundSample, default=())

    @classmethod
    def of(cls, device: str, date: str, ceilings: Ceilings, found: Mapping[str, Sequence[Sample]]) -> Samples:
        """The samples of kernel classes, by class."""
        kernels = tuple(KernelSample.of(kind, one) for kind, samples in found.items() for one in samples)
        return cls(device, date, ceilings.matmul_utilization, ceilings.read_utilization, kernels)

    def with_rounds(self, rounds: Sequence[RoundSample]) -> Samples:
        """The same with timed rounds."""
        return replace(self, rounds=tuple(rounds))

    def by_kind(self) -> dict[str, list[Sample]]:
        """The kernels' samples by class, in the order in which the classes were measured."""
        found: dict[str, list[Sample]] = {}
        for one in self.kernels:
            found.setdefault(one.kind, []).append(one.sample)
        return found

    def to_json(self) -> str:
        """JSON text that `read_samples` reads back to equal samples, one sample a line."""
        lists = {name: ",\n".join(json.dumps(asdict(one)) for one in getattr(self, name)) for name in LISTS}
        head = {name: value for name, value in vars(self).items() if name not in LISTS}
        body = "".join(f', "{name}": [\n{lines}\n]' for name, lines in lists.items())
        return json.dumps({"schema": SCHEMA, **head}, allow_nan=False)[:-1] + body + "}\n"


LISTS = ("kernels", "rounds")


def read_samples(path: Path) -> Samples:
    """Samples from a file, which is not trusted. Raises SamplesError naming it."""
    try:
        document: Any = parse_json(read_document(path))
        return build(Samples, fields_of_schema(document, SCHEMA, "calibrate again", SamplesError))
    except OSError as error:
        raise SamplesError(f"cannot read samples {brief(str(path))}: {error.strerror}") from None
    except ValueError as error:
        raise SamplesError(f"samples {brief(str(path))}: {error}") from None
