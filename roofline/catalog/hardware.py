"""Hardware figures: bandwidth, peaks and memory of GPUs and CPUs, each with its source. The catalog is gpus.toml."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import Catalog, build_catalog, letters_and_digits, read_tables
from ridgeplan.roofline.catalog.validation import Checked, InvalidField, brief, build


class UnknownHardware(ValueError):
    """A name that is neither in the catalog nor a TOML file."""


class BadHardwareFile(ValueError):
    """A user's hardware TOML that is missing, damaged, or has a wrong figure."""


@dataclass(frozen=True, kw_only=True)
class Hardware(Checked):
    """One device. Raises InvalidField (a ValueError) for wrong figures, and for a figure without a source.

    `compute_flops` (FLOP/s) is the dense peak of the type that models run in (bf16 with fp32 accumulation on GPUs,
    fp32 on CPUs), never the figure with structured sparsity. `host_link_bytes_per_s` is one direction. `sm_clock_hz` is
    the boost clock, 0 where it is unknown. The ranges are far wider than real devices; within them every prediction is
    a finite number.
    """

    name: str = check.name_text()
    kind: str = check.one_of(("gpu", "cpu"), "gpu")
    memory_bytes: int = check.whole(1 << 20, 10**15)
    bandwidth_bytes_per_s: float = check.number(1e6, 1e16)
    compute_flops: float = check.number(1e6, 1e19)
    int8_flops: float = check.number(1e6, 1e19)
    l2_bytes: int = check.whole(1, 10**12)
    num_sms: int = check.whole(1, 100_000)  # streaming multiprocessors of a GPU, cores of a CPU
    host_link_bytes_per_s: float = check.number(1e6, 1e16)
    compute_capability: str = check.text("none")
    sm_clock_hz: float = check.number(0, 1e11, default=0.0)
    element_bytes: int = check.whole(1, 8, default=2)
    dollars_per_hour: float = check.number(0, 1e6, default=0.0)  # of renting it; 0 where no price is listed
    board_watts: float = check.number(0, 1e6, default=0.0)  # the board's limit of power; 0 where it is not listed
    decode_watts: float = check.number(0, 1e6, default=0.0)  # of an engine that decodes; 0 where it was not measured
    unified_memory: bool = check.flag(False)  # CPU and GPU share one memory
    aliases: tuple[str, ...] = check.texts()
    note: str = check.text("")
    sources: dict[str, str] = check.texts_by_name(dict)

    def _owner(self) -> str:
        return f"hardware {brief(self.name)}: "

    def _contradiction(self) -> str | None:
        priced = [name for name in LISTED if getattr(self, name)]
        unsourced = [figure for figure in (*FIGURES, *priced) if figure not in self.sources]
        return f"sources must say where these come from: {', '.join(unsourced)}" if unsourced else None

    @property
    def ridge_point(self) -> float:
        """Intensity (FLOP/byte) above which this device is compute-bound (Williams et al., 2009)."""
        return self.compute_flops / self.bandwidth_bytes_per_s

    @property
    def shares_host_memory(self) -> bool:
        """Whether a layer on the host frees nothing: on a CPU, and where CPU and GPU share one memory."""
        return self.unified_memory or self.kind == "cpu"

    @property
    def issue_rate(self) -> float:
        """SMs x clock, to which the speed of instruction-bound kernels is proportional; 0 where it is unknown."""
        return self.num_sms * self.sm_clock_hz

    @property
    def is_amd(self) -> bool:
        """Whether its compute capability is the name of an AMD architecture, such as gfx942."""
        return self.compute_capability.startswith("gfx")

    @property
    def has_hopper_kernels(self) -> bool:
        """Whether this package's CUDA C++ kernels run: compute capability 9.0 and up."""
        return self.kind == "gpu" and _version(self.compute_capability) >= (9, 0)

    @property
    def has_kernels(self) -> bool:
        """Whether plans run: on CPUs, and on NVIDIA's GPUs unless their compute capability is known to be too low."""
        version = _version(self.compute_capability)
        return not (self.is_amd or (self.kind == "gpu" and version and version < MIN_CAPABILITY))


# The required numbers, each of which needs a source.
FIGURES = tuple(item.name for item in fields(Hardware) if item.type in (int, float) and item.default is MISSING)
LISTED = ("dollars_per_hour", "board_watts", "decode_watts")  # figures that a device may lack
MIN_CAPABILITY = (8, 0)  # of the kernels, which compute in bf16: Ampere's
_OLDER = {  # generations of GPUs that have none
    "Pascal": r"(tesla|quadro)?p\d|gtx10|titanxp", "Volta": r"(tesla|quadrog)?v100|titanv",
    "Turing": r"(tesla)?t4|rtx20|gtx16|titanrtx|quadrortx",
}  # fmt: skip
_SHIPPED = Path(__file__).with_name("gpus.toml")


def load_hardware(reference: str) -> Hardware:
    """A device by its name or alias in the catalog ("h200", "NVIDIA H200", "h200 sxm"), or from a user's TOML file.

    Such a file holds one table in the format of gpus.toml; figures without a source get the file as theirs.
    Raises UnknownHardware (with similar names) or BadHardwareFile.
    """
    if reference.lower().endswith(".toml"):
        return _from_file(Path(reference))
    hardware = _catalog().find(reference)
    if hardware is None:
        older = (generation for generation, names in _OLDER.items() if re.match(names, _normalize(reference)))
        if generation := next(older, None):
            allowed = "Ampere, Ada, Hopper or Blackwell, whose tensor cores compute in bf16"
            raise UnknownHardware(f"no plan runs on {brief(reference)}, of generation {generation}; allowed: {allowed}")
        names = ", ".join(item.name for item in list_hardware())
        hint = _catalog().suggestion(reference)
        raise UnknownHardware(
            f"unknown GPU {brief(reference)}.{hint} Known: {names}, `auto` for this machine, or a TOML file "
            "(`ridgeplan list gpus --template` prints one to fill in)"
        )
    return hardware


def listed(hardware: Hardware) -> Hardware:
    """The device with the catalog's price and power, where its own description, such as a profile's, lacks them."""
    known = _catalog().find(hardware.name)
    missing = [name for name in LISTED if not getattr(hardware, name)]
    if known is None or not missing:
        return hardware
    changes = {name: getattr(known, name) for name in missing}
    return replace(hardware, sources={**known.sources, **hardware.sources}, **changes)


def list_hardware() -> tuple[Hardware, ...]:
    """Every device of the catalog, in the file's order."""
    return _catalog().entries


def detect_hardware() -> str | None:
    """The catalog name of this machine's first GPU, or None if it has none or the catalog lacks it."""
    try:
        return match_driver_name(driver_listing())
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def driver_listing() -> str:
    """What nvidia-smi answers, asked once in a process: it starts the driver of every GPU, which may take seconds.

    Raises OSError and SubprocessError.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout


def match_driver_name(listing: str) -> str | None:
    """The catalog name of the first line of `name, memory in MiB` as nvidia-smi prints it, or None."""
    name, _, memory = listing.strip().partition("\n")[0].rpartition(",")
    hardware = _catalog().find(name) if name else None
    if hardware is None or not memory.strip().isdigit():
        return None
    # Some names cover several capacities (H20 with 96 or 141 GB): a different size is a different device.
    deviation = abs(int(memory) * 2**20 / hardware.memory_bytes - 1)
    return hardware.name if deviation < 0.1 else None


def _version(capability: str) -> tuple[int, ...]:
    """(9, 0) of "9.0"; nothing of a text that holds no version."""
    parts = capability.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _normalize(name: str) -> str:
    plain = letters_and_digits(name)
    for vendor in ("nvidia", "geforce"):
        plain = plain.removeprefix(vendor)
    return plain.removesuffix("gpu")


@cache
def _catalog() -> Catalog[Hardware]:
    shipped = [_from_table(name, table) for name, table in read_tables(_SHIPPED).items()]
    return build_catalog(((item, (item.name, *item.aliases)) for item in shipped), _normalize)


def _from_file(path: Path) -> Hardware:
    try:
        tables = read_tables(path)
        if len(tables) != 1:
            raise ValueError(f"one [table] is allowed, it has {len(tables)}")
        [(name, table)] = tables.items()
        sources = table.get("sources", {})
        if isinstance(sources, dict):  # the field's check reports anything else
            sources = {
                **dict.fromkeys((*FIGURES, *(name for name in LISTED if name in table)), f"given in {path.name}"),
                **sources,
            }
        return _from_table(name, {**table, "sources": sources})
    except OSError as error:
        raise BadHardwareFile(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadHardwareFile(f"{path} does not describe a GPU: {error}") from None


def _from_table(name: str, table: Mapping[str, Any]) -> Hardware:
    """The hardware of one TOML table. Raises InvalidField."""
    owner = f"hardware {brief(name)}: "
    if "processors" in table:
        raise InvalidField(f"{owner}processors has been renamed: write num_sms")
    if "name" in table:
        raise InvalidField(f"{owner}name is not a field of the table; allowed: as the table's title")
    return build(Hardware, {"name": name, **table}, owner)
