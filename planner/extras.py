"""Packages that only an extra of ridgeplan installs, and the pip command that does."""

from __future__ import annotations

import json
import re
from importlib import metadata, util

OPTIONAL = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]")


def pip_command(package: str) -> str | None:
    """The command that installs a package with the first extra of ridgeplan that has it; None if none has."""
    optional = map(OPTIONAL.match, metadata.requires("ridgeplan") or ())
    extra = next((match[2] for match in optional if match and match[1] == package), None)
    return extra and f"pip install 'ridgeplan[{extra}]{_origin()}'"


def _origin() -> str:
    """` @ URL` of the checkout or the wheel that ridgeplan was installed from (PEP 610); nothing for an index."""
    origin = json.loads(metadata.distribution("ridgeplan").read_text("direct_url.json") or "{}")
    system = origin.get("vcs_info", {}).get("vcs")
    return f" @ {f'{system}+' if system else ''}{origin['url']}" if origin else ""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The line for a command that lacks a package of an extra; None for any other missing module."""
    command = pip_command(error.name or "")
    return command and f"this needs {error.name}, which is not installed; install it with {command}"


def require_package(package: str) -> None:
    """Raises ModuleNotFoundError, without importing anything, where a package is not installed."""
    if util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
