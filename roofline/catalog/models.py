"""Finds the shape of a model: in the catalog models.toml, in a file, or in the local Hugging Face cache."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.config_json import fetched_config, shape_from_config, shape_from_config_file
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.files import (
    Catalog,
    NoHomeFolder,
    build_catalog,
    existing_path,
    hub_folder,
    read_tables,
)
from ridgeplan.roofline.catalog.gguf import shape_from_gguf
from ridgeplan.roofline.catalog.model_shape import BadModelFile, ModelShape, UnknownModel
from ridgeplan.roofline.catalog.validation import brief

_SHIPPED = Path(__file__).with_name("models.toml")
_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
MAX_COMMIT = 40  # hexadecimal digits


def load_shape(reference: str) -> ModelShape:
    """The shape of a model. `reference` is looked up, in this order, as

    1. a path: a .gguf file, a config.json, or a folder that holds a config.json;
    2. a name in the catalog, with or without its owner, in upper or lower case;
    3. a hub id, `owner/name`, whose config.json is in the local Hugging Face cache, or is fetched from the hub.

    Raises UnknownModel (with similar names) or BadModelFile, each one line.
    """
    path = existing_path(reference)
    if path or reference.lower().endswith((".gguf", ".json")):
        shape = _from_path(Path(reference))
        if shape:
            return shape
    if shape := _catalog().find(reference):
        return shape
    if _HUB_ID.fullmatch(reference):
        return shape_from_config_file(_hub_config(reference), name=reference)
    hint = _catalog().suggestion(reference)
    raise UnknownModel(
        f"unknown model {brief(reference)}.{hint} Allowed: a name of the catalog, a folder with a config.json, a .gguf "
        "file, or a hub id, owner/name"
    )


def list_models() -> tuple[ModelShape, ...]:
    """Every model of the catalog, in the file's order."""
    return _catalog().entries


def _from_path(path: Path) -> ModelShape | None:
    """The shape at a path; None for a folder without a model, whose name may still be in the catalog."""
    if path.suffix.lower() == ".gguf":
        return shape_from_gguf(path)
    if path.suffix.lower() == ".json":
        return shape_from_config_file(path, name=path.absolute().parent.name or path.stem)
    if existing_path(str(path / "config.json")):
        return shape_from_config_file(path / "config.json", name=path.resolve().name or "model")
    if path.is_dir():
        return None
    raise BadModelFile(f"{path} is neither a .gguf file, a config.json nor a folder with one")


def _hub_config(hub_id: str) -> Path:
    """The config.json of a hub id, cached or fetched. Raises UnknownModel, with similar names of the catalog."""
    try:
        return _cached_config(hub_id) or fetched_config(hub_id)
    except UnknownModel as error:
        raise UnknownModel(f"unknown model {brief(hub_id)}.{_catalog().suggestion(hub_id)} {error}") from None


def _cached_config(hub_id: str) -> Path | None:
    """The config.json of a hub id in the local cache: of its main branch, else of any snapshot."""
    try:
        folder = hub_folder() / f"models--{hub_id.replace('/', '--')}"
        main = folder / "refs" / "main"
        commit = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
        candidates = [
            folder / "snapshots" / commit[:MAX_COMMIT] / "config.json",
            *sorted(folder.glob("snapshots/*/config.json")),
        ]
        return next((config for config in candidates if config.is_file()), None)
    except (NoHomeFolder, OSError):  # a folder that is not known, or cannot be looked into
        return None


@cache
def _catalog() -> Catalog[ModelShape]:
    named = []
    for name, table in read_tables(_SHIPPED).items():
        names = [name, *table.pop("aliases", [])]
        short = [full.partition("/")[2] for full in names]
        config = table.pop("config", None)  # the keys of its config.json, in place of fields
        shape = shape_from_config(config, name, **table) if config else _from_fields(name, table)
        named.append((shape, (*names, *short)))
    return build_catalog(named, str.casefold)


def _from_fields(name: str, table: dict[str, Any]) -> ModelShape:
    """The shape of a table of `ModelShape`'s fields, with its family's traits."""
    return ModelShape(name=name, traits=families()[table["architecture"]].traits, **table)
