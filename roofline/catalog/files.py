"""Files: untrusted JSON and TOML documents, catalogs of named TOML tables, and the user's folders.

Every error is a one-line ValueError; the caller adds the name of the file.
"""

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ridgeplan.roofline.catalog.validation import brief

MAX_DOCUMENT_BYTES = 16 << 20  # plans, profiles and hardware files are a few kilobytes
MAX_DIGITS = 4000  # a little below Python's own limit


def read_document(path: Path) -> bytes:
    """The bytes of a small file. Raises OSError, or ValueError for a large one without reading all of it."""
    with path.open("rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        size = f"{MAX_DOCUMENT_BYTES >> 20} MiB"
        raise ValueError(f"it is larger than {size}; allowed: up to {size}")
    return content


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file then replaces that of `path`, completely or not at all.

    It is in a new folder beside the target, which only this user can write to: no link can stand there. A `path` that
    is a link stays one, and the file behind it is replaced. A replaced file keeps its mode. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".ridgeplan-") as folder:
        staging = Path(folder, target.name)
        yield staging
        if target.exists():
            shutil.copymode(target, staging)
        staging.replace(target)


@contextmanager
def naming_file(title: str, path: str | os.PathLike[str], error: type[ValueError]) -> Iterator[None]:
    """Raises `error`, which names the file, for an OSError or a ValueError of the body. title: what the file is."""
    try:
        yield
    except OSError as problem:
        raise error(f"cannot read {title} {brief(str(path))}: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{title} {brief(str(path))}: {problem}") from None


def parse_json(document: str | bytes) -> Any:
    """The value of UTF-8 JSON. Raises ValueError, also for duplicate keys and for NaN."""
    return _parsed(document, _json_value, "JSON")


def json_or(error: type[ValueError], document: str | bytes, expected: str = "JSON") -> Any:
    """`parse_json`, which raises `error` for what is not `expected`."""
    try:
        return parse_json(document)
    except ValueError as problem:
        raise error(f"not {expected}: {problem}") from None


def parse_toml(document: str | bytes) -> dict[str, Any]:
    """The tables of UTF-8 TOML. Raises ValueError."""
    tables: dict[str, Any] = _parsed(document, _toml_tables, "TOML")
    return tables


def fields_of_schema(document: object, schema: int, advice: str, error: type[ValueError]) -> dict[str, Any]:
    """The fields of an object except "schema". Raises `error` for another schema, with advice for an older one."""
    if not isinstance(document, dict):
        raise error(f"it is {brief(document)}; allowed: an object with named fields")
    version = document.get("schema")
    if type(version) is not int or version < 1:
        wrong = brief(version) if "schema" in document else "missing, as ridgeplan did not write this document"
        raise error(f"schema is {wrong}; allowed: {schema}")
    if version > schema:
        raise error(f"schema {brief(version)} is newer than this version reads; allowed: up to {schema}")
    if version < schema:
        raise error(f"schema {version} is of an older version; {advice}")
    return {name: value for name, value in document.items() if name != "schema"}


def _parsed(document: str | bytes, parse: Callable[[str], Any], language: str) -> Any:
    try:
        return parse(document if isinstance(document, str) else document.decode())
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"it is not UTF-8 text: {byte}; allowed: {language} in UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply; allowed: a few levels") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{error}; allowed: {language}") from None


def _toml_tables(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit, whose message names a function of Python
        raise ValueError(f"a number has too many digits; allowed: up to {MAX_DIGITS}") from None


def _json_value(text: str) -> Any:
    if not text.strip():
        raise ValueError("it is empty; allowed: JSON")
    return json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=_no_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {brief(key)} stands twice in one object; allowed: once")
        members[key] = value
    return members


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; allowed: up to {MAX_DIGITS}")
    return int(digits)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} stands for a number; allowed: finite numbers")


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
        """' Did you mean a, b?' with up to three entries whose names begin so or are similar, else ''."""
        normalized = self.normalize(reference)[:200]  # matching takes time quadratic in the length
        longer = [name for name in self.by_name if normalized and name.startswith(normalized)]
        near = [*longer, *get_close_matches(normalized, list(self.by_name), n=8, cutoff=0.6)]
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
        problem = f"{brief(stray[0])} stands outside a [table]" if stray else "it has no [table]"
        raise ValueError(f"{problem}; allowed: tables alone")
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


class NoHomeFolder(ValueError):
    """A path needs the user's home folder, which the system does not know."""


def home_folder() -> Path:
    """The user's home folder. Raises NoHomeFolder where HOME is unset and the user has no entry in the system."""
    try:
        return Path.home()
    except RuntimeError:
        raise NoHomeFolder(
            "this user has no home folder; allowed: HOME or XDG_CACHE_HOME set to a folder that can be written"
        ) from None


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ridgeplan, by default ~/.cache/ridgeplan. Raises NoHomeFolder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else home_folder() / ".cache") / "ridgeplan"


def quantized_folder() -> Path:
    """Where quantized weights are saved. Raises NoHomeFolder."""
    return cache_folder() / "quantized"


def hub_folder() -> Path:
    """Where huggingface_hub caches models: $HF_HUB_CACHE, $HF_HOME/hub, or ~/.cache/huggingface/hub."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else home_folder() / ".cache" / "huggingface") / "hub"


def expanded(path: str) -> Path:
    """`path` with a leading ~ or ~user replaced. Raises NoHomeFolder for a user that the system does not know."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise NoHomeFolder(f"the home folder in {path[:80]!r} is not known; allowed: a path without it") from None
