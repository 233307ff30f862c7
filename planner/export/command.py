"""A serve command: as words of a shell, and as the YAML file that its `--config` reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """serve: the words before the arguments. arguments: names with a number, a text, True for a flag, or an object."""

    serve: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments as words."""
        return tuple(word for name, value in self.arguments for word in _words(name, value))

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command."""
        return (*self.serve, *self.options)

    def shell(self) -> str:
        """The command for a POSIX shell, one argument a line."""
        lines = [shlex.join(self.serve), *(shlex.join(_words(name, value)) for name, value in self.arguments)]
        return " \\\n  ".join(lines)

    def yaml(self) -> str:
        """The same arguments as YAML for `--config`; objects are JSON texts, as the arguments themselves are."""
        lines = (f"{name.removeprefix('--')}: {_scalar(value)}" for name, value in self.arguments)
        return "\n".join([f"# {shlex.join(self.serve)} --config THIS-FILE", *lines, ""])


def _words(name: str, value: Any) -> Iterator[str]:
    yield name
    if value is not True:
        yield value if isinstance(value, str) else json.dumps(value)


def _scalar(value: Any) -> str:
    """A YAML scalar: JSON's numbers, booleans and texts are YAML too; texts of objects are quoted once more."""
    if isinstance(value, dict):
        text = json.dumps(value).replace("'", "''")
        return f"'{text}'"
    return json.dumps(value)
