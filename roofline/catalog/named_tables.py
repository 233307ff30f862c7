"""Named TOML tables, the catalogs' format: reading them, and finding an entry by any of its names."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ridgeplan.roofline.catalog.documents import parse_toml, read_document
from ridgeplan.roofline.catalog.mistakes import brief


class Named(Protocol):
    """An entry of a catalog: anything with a name."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


@dataclass(frozen=True)
class Catalog(Generic[Entry]):
    """Entries in the file's order, and the entry of every normalized name; made by `build_catalog`."""

    entries: tuple[Entry, ...]
    by_name: dict[str, Entry]
    normalize: Callable[[str], str]

    def find(self, reference: str) -> Entry | None:
        """The entry with this name or alias, if any."""
        return self.by_name.get(self.normalize(reference))

    def suggestion(self, reference: str) -> str:
        """' Did you mean a, b?' with up to three entries whose names are similar, else ''."""
        wanted = self.normalize(reference)[:200]  # matching takes time quadratic in the length
        near = get_close_matches(wanted, list(self.by_name), n=8, cutoff=0.6)
        names = list(dict.fromkeys(self.by_name[match].name for match in near))[:3]
        return f" Did you mean {', '.join(names)}?" if names else ""


def build_catalog(named: Iterable[tuple[Entry, Iterable[str]]], normalize: Callable[[str], str]) -> Catalog[Entry]:
    """A catalog of (entry, its names); a name shared by several entries finds the first one."""
    entries: list[Entry] = []
    by_name: dict[str, Entry] = {}
    for entry, names in named:
        entries.append(entry)
        for name in names:
            by_name.setdefault(normalize(name), entry)
    return Catalog(tuple(entries), by_name, normalize)


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The top-level tables of a TOML file. Raises ValueError (one line, without the path) or OSError."""
    content = parse_toml(read_document(path))
    stray = [key for key, value in content.items() if not isinstance(value, dict)]
    if stray or not content:
        raise ValueError(f"{brief(stray[0])} stands outside a [table]" if stray else "it has no [table]")
    return content


def existing_path(reference: str) -> Path | None:
    """The path that a reference names, if something exists there."""
    try:
        return Path(reference) if reference and Path(reference).exists() else None
    except (OSError, ValueError):  # a name too long for the file system, or with a NUL byte
        return None


def letters_and_digits(name: str) -> str:
    """`name` in lower case, without all characters that are neither letters nor digits."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())
