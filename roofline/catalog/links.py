"""Links between GPUs, each figure with its source. The catalog is links.toml."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import read_tables
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.validation import Checked, brief, build

PCIE, BETWEEN_NODES = "pcie", "infiniband-ndr"


@dataclass(frozen=True, kw_only=True)
class Link(Checked):
    """A link by which GPUs exchange messages. Raises InvalidField, also for a figure without a source.

    bandwidth_bytes_per_s: of a GPU in one direction. latency_s: of the smallest message. hop_s: of each further step.
    """

    name: str = check.name_text()
    title: str = check.text()
    bandwidth_bytes_per_s: float = check.number(1e6, 1e16)
    latency_s: float = check.number(0, 1)
    hop_s: float = check.number(0, 1)
    utilization: float = check.number(1e-3, 1)
    gpus_per_node: int = check.whole(1, 100_000)
    multicast: bool = check.flag(False)
    of: tuple[str, ...] = check.texts()
    sources: dict[str, str] = check.texts_by_name(dict)

    def _owner(self) -> str:
        return f"link {brief(self.name)}: "

    def _contradiction(self) -> str | None:
        unsourced = [figure for figure in _FIGURES if figure not in self.sources]
        return f"sources must say where these come from: {', '.join(unsourced)}" if unsourced else None

    @property
    def bytes_per_s(self) -> float:
        """The rate that large messages reach."""
        return self.utilization * self.bandwidth_bytes_per_s


_FIGURES = tuple(item.name for item in fields(Link) if item.type in ("int", "float") and item.default is MISSING)


@cache
def list_links() -> tuple[Link, ...]:
    """Every link of the catalog, in the file's order."""
    tables = read_tables(Path(__file__).with_name("links.toml"))
    return tuple(build(Link, {"name": name, **table}, f"link {brief(name)}: ") for name, table in tables.items())


def link_of(hardware: Hardware) -> Link:
    """The link between GPUs of a node: NVLink or the like, else PCIe at the GPU's own bandwidth."""
    named = {link.name: link for link in list_links()}
    listed = next((link for link in named.values() if hardware.name in link.of), None)
    return listed or replace(named[PCIE], bandwidth_bytes_per_s=hardware.host_link_bytes_per_s)


def link_between_nodes() -> Link:
    """The link between nodes."""
    return next(link for link in list_links() if link.name == BETWEEN_NODES)


def links_title(hardware: Hardware, gpus: int) -> str:
    """The links that join so many GPUs."""
    link = link_of(hardware)
    return link.title if gpus <= link.gpus_per_node else f"{link.title} and {link_between_nodes().title}"
