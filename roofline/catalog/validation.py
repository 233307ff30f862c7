"""Validation of untrusted values: self-checking dataclasses, and messages that list every wrong field.

    @dataclass(frozen=True)
    class Box(Checked):
        width: int = whole(1, 100)  # cm

`build` makes such a dataclass, and those inside it, from untrusted JSON or TOML values with the same checks. Only
pydantic's core is used: importing pydantic itself, to derive checks from annotations, would take 0.1 s.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from functools import cache
from reprlib import Repr
from typing import Any, ClassVar, TypeVar

from pydantic_core import SchemaValidator, ValidationError, core_schema
from pydantic_core.core_schema import CoreSchema

MAX_LISTED = 16  # mistakes per message: all that a file of hardware can have
BRIEF_CHARACTERS = 80
# What a container must be, by the type of its schema, and by that of pydantic's error. All other checks state what they
# allow.
_CONTAINERS = {"dataclass-args": "an object with named fields", "dict": "an object", "tuple": "a list"}
_CONTAINER_ERRORS = {
    "dataclass_type": _CONTAINERS["dataclass-args"],
    "dict_type": _CONTAINERS["dict"],
    "model_attributes_type": _CONTAINERS["dataclass-args"],
    "tuple_type": _CONTAINERS["tuple"],
    "invalid_key": "a text as name",
}


def brief(value: object) -> str:
    """`value` for an error message: one line of at most 80 characters, whatever its size and depth."""
    shown = " ".join(_Brief().repr(value).split())
    shown = re.sub(f"[{INVISIBLE}]", lambda character: ascii(character[0])[1:-1], shown)  # repr() leaves some
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
    fields = [text.partition(" is not a field")[2] for text in mistakes]  # those of an object are listed once
    mistakes = [
        text.removesuffix(end) if end in fields[:i] else text
        for i, (text, end) in enumerate(zip(mistakes, fields, strict=True))
    ]
    more = len(details) - len(mistakes)
    return numbered(mistakes, len(details)) + (f"; and {more} more" if more else "")


def numbered(mistakes: Sequence[str], count: int = 0) -> str:
    """The only mistake, or all in one line. count: how many there are, by default those given."""
    if len(mistakes) == 1:
        return mistakes[0]
    texts = "; ".join(f"({index}) {mistake}" for index, mistake in enumerate(mistakes, start=1))
    return f"{count or len(mistakes)} mistakes: {texts}"


class Mistakes(ValueError):
    """Several mistakes of a user's input."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__(numbered(mistakes))
        self.mistakes = tuple(mistakes)


def together(steps: Iterable[Callable[[], Any]], known: Sequence[str] = ()) -> list[Any]:
    """The results of all steps. known: mistakes that were seen before.

    Raises the error of the only step that fails, or Mistakes with those of all; defects raise at once.
    """
    results, problems, mistakes = [], [], [*known]
    for step in steps:
        try:
            results.append(step())
        except ValueError as problem:
            if not is_user_error(problem):
                raise
            problems.append(problem)
            mistakes += getattr(problem, "mistakes", (str(problem),))
    if problems and not known and len(problems) == 1:
        raise problems[0]
    if mistakes:
        raise Mistakes(mistakes)
    return results


def with_names(text: str, name: Callable[[str], str]) -> str:
    """`text` with a front end's names of the arguments in it, which are written as in Python: `gpus=8`, `yarn=True`."""
    return re.sub(r"`(\w+)=(?:True|([\w+]+))`", lambda match: " ".join(filter(None, (name(match[1]), match[2]))), text)


def with_options(text: str) -> str:
    """`with_names` of the command line."""
    return with_names(text, lambda name: f"--{name.replace('_', '-')}")


def is_user_error(error: ValueError) -> bool:
    """Whether the user's input caused an error: the package defines its class. Other errors keep their traceback."""
    return type(error).__module__.startswith("ridgeplan.")


def _mistake(details: Mapping[str, Any], arguments: CoreSchema) -> str:
    path, code = details["loc"], details["type"]
    name = _dotted(path)
    if code == "value_error":  # raised while constructing a nested dataclass
        return f"{name}: {details['ctx']['error']}" if name else str(details["ctx"]["error"])
    if code == "missing":
        return f"{name} is missing; allowed: {_allowed_at(arguments, path)}"
    if code == "unexpected_keyword_argument":
        return f"{name} is not a field; allowed: {', '.join(_field_names(arguments, path[:-1]))}"
    return f"{name or 'it'} is {brief(details['input'])}; allowed: {_CONTAINER_ERRORS.get(code, details['msg'])}"


def _dotted(path: Iterable[str | int]) -> str:
    """`classes.linear.launch_s`, `aliases[2]`; keys that are not short names are quoted."""
    shown = (f"[{step}]" if isinstance(step, int) else f".{_name(step)}" for step in path)
    return "".join(shown).removeprefix(".")


def _name(key: str) -> str:
    return key if key.isascii() and key.isidentifier() and len(key) <= BRIEF_CHARACTERS else brief(key)


def _field_names(arguments: CoreSchema, path: Iterable[str | int]) -> list[str]:
    """The names of the fields of the dataclass that a path leads to."""
    return [item["name"] for item in _schema_at(arguments, path)["fields"]]


def _allowed_at(arguments: CoreSchema, path: Iterable[str | int]) -> str:
    """What may stand where a path leads to."""
    schema = _schema_at(arguments, path)
    allowed: str = _CONTAINERS.get(schema["type"]) or schema.get("custom_error_message", "any value")
    return allowed


def _schema_at(schema: Any, path: Iterable[str | int]) -> Any:
    """The schema that a path leads to, without its default."""
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
    return schema


MAX_TEXT, MAX_NAME = 4096, 255  # characters; a name may be that of a file
# For a character class: control characters, line separators, and marks that reorder a line. In a name from a file they
# could forge lines on a terminal or in another file.
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
# For a character class: what fonts show as nothing (Unicode's Default_Ignorable_Code_Point, such as zero-width spaces
# and tags) and marks of annotations. Two names that differ only in them look equal. Text that a model generates may
# have them, as emoji and some scripts need joiners.
INVISIBLE = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    r"\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)


class InvalidField(ValueError):
    """A field of a model shape or of a hardware description is out of range or of the wrong type."""


class Checked:
    """Base of frozen dataclasses that validate their fields on construction, by code or by `build`.

    A wrong field raises the class's `error` with one line that lists what is wrong and what is allowed.
    """

    error: ClassVar[type[ValueError]] = InvalidField

    def __post_init__(self) -> None:
        """Validates the fields, converting numbers, enums and lists to the declared types."""
        kind: Any = type(self)
        try:
            values, _ = _validator(kind, arguments_only=True).validate_python(vars(self))
        except ValidationError as invalid:
            raise self.error(self._owner() + listed(invalid, _arguments_schema(kind))) from None
        vars(self).update(values)  # frozen instances refuse setattr
        problem = self._contradiction()
        if problem:
            raise self.error(self._owner() + problem)

    def _owner(self) -> str:
        """Prefix of error messages, such as "model 'x': ", for instances with a name."""
        return ""

    def _contradiction(self) -> str | None:
        """What is wrong with the combination of fields that are each valid, or None."""
        return None


Made = TypeVar("Made", bound=Checked)


def whole(low: int, high: int, default: Any = MISSING) -> Any:
    """A field that holds an int (no bool, no float) in low..high; default None also allows None."""
    schema: CoreSchema = core_schema.int_schema(strict=True, ge=low, le=high)
    if default is None:
        schema = core_schema.nullable_schema(schema)
    return _checked(schema, f"a whole number from {low} to {high}", default)


def number(low: float, high: float, default: Any = MISSING) -> Any:
    """A field that holds a real number in low..high, stored as a float."""
    return field(default=default, metadata={"check": _real(low, high)})


def flag(default: Any = MISSING) -> Any:
    """A field that holds a bool."""
    return _checked(core_schema.bool_schema(strict=True), "true or false", default)


def text(default: Any = MISSING) -> Any:
    """A field that holds one line of text, empty only if that is its default."""
    return field(default=default, metadata={"check": _text(empty=default == "")})


def name_text() -> Any:
    """A field that holds the name of a model or of a machine."""
    return field(metadata={"check": _text(max_length=MAX_NAME)})


def one_of(allowed: Iterable[Any], default: Any = MISSING) -> Any:
    """A field that holds a member of an enum, which may be given by its value, or one of some ints or strings.

    Default None also allows None.
    """
    if isinstance(allowed, type) and issubclass(allowed, Enum):
        values = [member.value for member in allowed]
        schema: CoreSchema = core_schema.enum_schema(allowed, list(allowed), sub_type="str")
    else:
        values = list(allowed)
        literal = core_schema.literal_schema(values)  # alone it would accept 4.0 for 4
        kind = core_schema.int_schema if isinstance(values[0], int) else core_schema.str_schema
        schema = core_schema.chain_schema([kind(strict=True), literal])
    if default is None:
        schema = core_schema.nullable_schema(schema)
    return _checked(schema, ", ".join(map(str, values)), default)


def part(kind: type["Checked"], required: bool = False) -> Any:
    """A field that holds another checked dataclass, by default one with its own defaults."""
    return field(default_factory=MISSING if required else kind, metadata={"check": lambda: _object_schema(kind)})


def part_or_none(kind: type["Checked"]) -> Any:
    """A field that holds another checked dataclass, or None, the default."""
    return field(default=None, metadata={"check": lambda: core_schema.nullable_schema(_object_schema(kind))})


def variant(kinds: Mapping[str, type["Checked"]], default: Any = MISSING) -> Any:
    """A field that holds one of several checked dataclasses, which their field `name` tells apart.

    `kinds` may be a registry that is filled later, before the first check.
    """

    def schema() -> CoreSchema:
        return core_schema.tagged_union_schema(
            {name: _object_schema(kind) for name, kind in kinds.items()},
            discriminator="name",
            custom_error_type="allowed",
            custom_error_message=f"an object whose name is one of {', '.join(kinds)}",
        )

    return field(default=default, metadata={"check": schema})


def parts_by_name(kind: type["Checked"], default_factory: Any = MISSING) -> Any:
    """A field that maps names to checked dataclasses."""
    check = core_schema.dict_schema(_text(), _object_schema(kind))
    return field(default_factory=default_factory, metadata={"check": check})


def texts_by_name(default_factory: Any = MISSING) -> Any:
    """A field that maps names to non-empty strings; excluded from the hash."""
    schema = core_schema.dict_schema(_text(), _text())
    return field(default_factory=default_factory, hash=False, metadata={"check": schema})


def texts() -> Any:
    """A field that holds a tuple of non-empty strings, by default an empty one."""
    return field(default=(), metadata={"check": core_schema.tuple_variable_schema(_text())})


def numbers(low: float, high: float, default: Any = MISSING) -> Any:
    """A field that holds a tuple of real numbers in low..high."""
    return field(default=default, metadata={"check": core_schema.tuple_variable_schema(_real(low, high))})


def wholes(low: int, high: int, default: Any = MISSING) -> Any:
    """A field that holds a tuple of ints in low..high."""
    item = _allowing(core_schema.int_schema(strict=True, ge=low, le=high), f"a whole number from {low} to {high}")
    return field(default=default, metadata={"check": core_schema.tuple_variable_schema(item)})


def parts(kind: type["Checked"], default: Any = MISSING) -> Any:
    """A field that holds a tuple of checked dataclasses."""
    return field(default=default, metadata={"check": core_schema.tuple_variable_schema(_object_schema(kind))})


def values_by_name(default_factory: Any = MISSING) -> Any:
    """A field that maps names to texts and finite numbers; excluded from the hash."""
    return field(default_factory=default_factory, hash=False, metadata={"check": _values_by_name()})


def tables() -> Any:
    """A field that holds a tuple of mappings from names to texts and finite numbers, by default an empty one."""
    return field(default=(), metadata={"check": core_schema.tuple_variable_schema(_values_by_name())})


def build(kind: type[Made], values: object, owner: str = "") -> Made:
    """A dataclass, with those inside it, from parsed JSON or TOML.

    Raises the class's `error`, after the owner's name, also for fields that are missing or unknown.
    """
    checked: Any = kind
    try:
        instance: Made = _validator(checked).validate_python(values)
    except ValidationError as invalid:
        raise kind.error(owner + listed(invalid, _arguments_schema(kind))) from None
    return instance


def _real(low: float, high: float) -> CoreSchema:
    schema = core_schema.float_schema(strict=True, ge=low, le=high, allow_inf_nan=False)
    return _allowing(schema, f"a number from {low:g} to {high:g}")


def _values_by_name() -> CoreSchema:
    values = (
        _line(0, MAX_TEXT),
        core_schema.int_schema(strict=True),
        core_schema.float_schema(strict=True, allow_inf_nan=False),
    )
    plain = _allowing(core_schema.union_schema(list(values)), "a text or a finite number")
    return core_schema.dict_schema(_text(), plain)


def _text(empty: bool = False, max_length: int = MAX_TEXT) -> CoreSchema:
    min_length = 0 if empty else 1
    allowed = f"a text of {min_length} to {max_length} characters without control or invisible ones"
    return _allowing(_line(min_length, max_length), allowed)


def _line(min_length: int, max_length: int) -> CoreSchema:
    """A text of one line; pydantic refuses lone surrogates, which no file can hold."""
    pattern = f"^[^{UNPRINTABLE}{INVISIBLE}]*$"
    return core_schema.str_schema(strict=True, min_length=min_length, max_length=max_length, pattern=pattern)


def _checked(schema: CoreSchema, allowed: str, default: Any) -> Any:
    return field(default=default, metadata={"check": _allowing(schema, allowed)})


def _allowing(schema: CoreSchema, allowed: str) -> CoreSchema:
    """The schema with a single error message, which says what is allowed."""
    return core_schema.custom_error_schema(schema, custom_error_type="allowed", custom_error_message=allowed)


@cache
def _validator(kind: type, arguments_only: bool = False) -> SchemaValidator:
    return SchemaValidator(_arguments_schema(kind) if arguments_only else _object_schema(kind))


def _object_schema(kind: Any) -> CoreSchema:
    """An instance of the dataclass, or a mapping with its fields."""
    names = [item.name for item in fields(kind)]
    return core_schema.dataclass_schema(kind, _arguments_schema(kind), names, post_init=True)


def _arguments_schema(kind: Any) -> CoreSchema:
    items = [core_schema.dataclass_field(item.name, _field_schema(item)) for item in fields(kind)]
    return core_schema.dataclass_args_schema(kind.__name__, items, extra_behavior="forbid")


def _field_schema(item: Field[Any]) -> CoreSchema:
    schema = item.metadata.get("check") or core_schema.any_schema()
    if callable(schema):
        schema = schema()
    if item.default is not MISSING:
        return core_schema.with_default_schema(schema, default=item.default)
    if item.default_factory is not MISSING:
        return core_schema.with_default_schema(schema, default_factory=item.default_factory)
    return schema
