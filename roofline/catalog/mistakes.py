"""Error messages for wrong values: which fields, a short form of what they hold, and what is allowed."""

from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Any

from pydantic_core import ValidationError
from pydantic_core.core_schema import CoreSchema

MAX_LISTED = 16  # mistakes per message: all that a file of hardware can have
BRIEF_CHARACTERS = 80
# What a container must be, by the type of pydantic's error. All other checks state what they allow.
_CONTAINERS = {
    "dataclass_type": "an object with named fields",
    "dict_type": "an object",
    "model_attributes_type": "an object with named fields",
    "tuple_type": "a list",
    "invalid_key": "a text as name",
}


def brief(value: object) -> str:
    """`value` for an error message: one line of at most 80 characters, whatever its size and depth."""
    shown = " ".join(_Brief().repr(value).split())
    return shown if len(shown) <= BRIEF_CHARACTERS else f"{shown[: BRIEF_CHARACTERS - 3]}..."


class _Brief(Repr):
    """repr() that looks at the first few items only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = BRIEF_CHARACTERS

    def repr_int(self, value: int, level: int) -> str:
        """At most 50 digits; Python refuses to print thousands."""
        return repr(value) if abs(value) < 10**50 else "a huge number"


def listed(invalid: ValidationError, arguments: CoreSchema) -> str:
    """One line: the only mistake, or the first few, numbered. `arguments` are the fields of the checked dataclass."""
    details = invalid.errors(include_url=False)
    mistakes = [_mistake(item, arguments) for item in details[:MAX_LISTED]]
    if len(mistakes) == 1:
        return mistakes[0]
    numbered = "; ".join(f"({index}) {mistake}" for index, mistake in enumerate(mistakes, start=1))
    more = len(details) - len(mistakes)
    return f"{len(details)} mistakes: {numbered}" + (f"; and {more} more" if more else "")


def _mistake(details: Mapping[str, Any], arguments: CoreSchema) -> str:
    path, code = details["loc"], details["type"]
    name = _dotted(path)
    if code == "value_error":  # raised while constructing a nested dataclass
        return f"{name}: {details['ctx']['error']}" if name else str(details["ctx"]["error"])
    if code == "missing":
        return f"{name} is missing"
    if code == "unexpected_keyword_argument":
        return f"{name} is not a field; allowed: {', '.join(_field_names(arguments, path[:-1]))}"
    return f"{name or 'it'} is {brief(details['input'])}; allowed: {_CONTAINERS.get(code, details['msg'])}"


def _dotted(path: Iterable[str | int]) -> str:
    """`classes.linear.launch_s`, `aliases[2]`; keys that are not short names are quoted."""
    shown = (f"[{step}]" if isinstance(step, int) else f".{_name(step)}" for step in path)
    return "".join(shown).removeprefix(".")


def _name(key: str) -> str:
    return key if key.isidentifier() and len(key) <= BRIEF_CHARACTERS else brief(key)


def _field_names(schema: Any, path: Iterable[str | int]) -> list[str]:
    """The names of the fields of the dataclass that a path leads to."""
    for step in path:
        if schema["type"] == "dict":
            schema = schema["values_schema"]
        elif schema["type"] == "tuple":
            schema = schema["items_schema"][0]
        elif schema["type"] == "tagged-union":
            schema = schema["choices"][step]
        else:
            schema = next(item["schema"] for item in schema["fields"] if item["name"] == step)
        while schema["type"] in ("default", "dataclass"):
            schema = schema["schema"]
    return [item["name"] for item in schema["fields"]]
