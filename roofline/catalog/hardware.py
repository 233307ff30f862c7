"""The figures of a GPU or CPU that bound its speed, each with its source; the catalog in gpus.toml."""

import subprocess
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.checks import InvalidField, brief, check_fields, one_of, positive, text, whole
from ridgeplan.roofline.catalog.named_tables import Catalog, build_catalog, letters_and_digits, read_tables


class UnknownHardware(ValueError):
    """The reference is neither in the catalog nor a TOML file."""


class BadHardwareFile(ValueError):
    """A user's hardware TOML is missing, damaged or has a wrong figure."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device. Raises InvalidField (a ValueError) naming a bad figure, or one that has no source.

    `compute_flops` is the dense peak of the type the models run in (bf16 with fp32 accumulation on GPUs,
    fp32 on CPUs), never the figure with structured sparsity. `host_link_bytes_per_s` is one direction.
    """

    name: str = text()
    kind: str = one_of(("gpu", "cpu"), "gpu")
    memory_bytes: int = whole(1, 10**15)
    bandwidth_bytes_per_s: float = positive(1e16)
    compute_flops: float = positive(1e19)
    int8_flops: float = positive(1e19)
    l2_bytes: int = whole(1, 10**12)
    num_sms: int = whole(1, 100_000)  # streaming multiprocessors, or cores
    host_link_bytes_per_s: float = positive(1e14)
    compute_capability: str = text("none")
    element_bytes: int = whole(1, 8, default=2)
    aliases: tuple[str, ...] = ()
    note: str = text("")
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        owner = f"hardware {brief(self.name)}"
        check_fields(self, owner)
        for figure in FIGURES:
            if not isinstance(self.sources.get(figure), str) or not self.sources[figure]:
                raise InvalidField(f"{owner}: sources must say where {figure} comes from")

    @property
    def ridge_point(self) -> float:
        """Intensity (FLOP/byte) above which this device is compute-bound (Williams et al., 2009)."""
        return self.compute_flops / self.bandwidth_bytes_per_s


# Every number that must be given, and whose source must be given with it.
FIGURES = tuple(item.name for item in fields(Hardware) if item.type in (int, float) and item.default is MISSING)
_SHIPPED = Path(__file__).with_name("gpus.toml")


def load_hardware(reference: str) -> Hardware:
    """A device by catalog name or alias ("h200", "NVIDIA H200", "h200 sxm"), or from a user's TOML file.

    Such a file holds one table in the format of gpus.toml; figures without a source get the file as theirs.
    Raises UnknownHardware (with near names) or BadHardwareFile.
    """
    if reference.lower().endswith(".toml"):
        return _from_file(Path(reference))
    found = _catalog().find(reference)
    if found is None:
        names = ", ".join(item.name for item in list_hardware())
        hint = _catalog().suggestion(reference)
        raise UnknownHardware(f"unknown GPU {brief(reference)}.{hint} Known: {names}, or a path to a TOML file")
    return found


def list_hardware() -> tuple[Hardware, ...]:
    """Every device of the catalog, in the file's order."""
    return _catalog().entries


def detect_hardware() -> str | None:
    """The catalog name of this machine's first GPU, or None where there is none or the catalog lacks it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return match_driver_name(answer.stdout)


def match_driver_name(listing: str) -> str | None:
    """The catalog name of the first line of `name, memory in MiB` as nvidia-smi prints it, or None."""
    name, _, memory = listing.strip().partition("\n")[0].rpartition(",")
    found = _catalog().find(name) if name else None
    if found is None or not memory.strip().isdigit():
        return None
    # Some names cover several capacities (H20 with 96 or 141 GB); another size is another device.
    off = abs(int(memory) * 2**20 / found.memory_bytes - 1)
    return found.name if off < 0.1 else None


def _normalize(name: str) -> str:
    plain = letters_and_digits(name)
    for vendor in ("nvidia", "geforce"):
        plain = plain.removeprefix(vendor)
    return plain.removesuffix("gpu")


@cache
def _catalog() -> Catalog[Hardware]:
    shipped = [_make(name, table) for name, table in read_tables(_SHIPPED).items()]
    return build_catalog(((item, (item.name, *item.aliases)) for item in shipped), _normalize)


def _from_file(path: Path) -> Hardware:
    try:
        tables = read_tables(path)
        if len(tables) != 1:
            raise ValueError(f"one [table] is allowed, it has {len(tables)}")
        [(name, table)] = tables.items()
        given = table.get("sources", {})
        if not isinstance(given, dict):
            raise ValueError(f"sources must be a table, not {brief(given)}")
        return _make(name, {**table, "sources": {**dict.fromkeys(FIGURES, f"given in {path.name}"), **given}})
    except OSError as error:
        raise BadHardwareFile(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadHardwareFile(f"{path} does not describe a GPU: {error}") from None


def _make(name: str, table: Mapping[str, Any]) -> Hardware:
    known = {item.name for item in fields(Hardware)} - {"name"}
    for key in table:
        if key not in known:
            raise InvalidField(f"hardware {brief(name)}: {key!r} is not a figure; allowed: {', '.join(sorted(known))}")
    for key in sorted(set(FIGURES) - set(table)):
        raise InvalidField(f"hardware {brief(name)}: {key} is missing")
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidField(f"hardware {brief(name)}: aliases must be a list of names, not {brief(aliases)}")
    return Hardware(name=name, **{**table, "aliases": tuple(aliases)})
