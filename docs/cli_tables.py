"""The reference of the `ridgeplan` command in docs/cli.md, read from its click parser."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from readme_tables import table

from ridgeplan.dashboards.cli import main
from ridgeplan.dashboards.cli.errors import EXIT_CODES
from ridgeplan.dashboards.cli.groups import LazyGroup
from ridgeplan.dashboards.cli.options import one_name

STATED_DEFAULT = re.compile(r"\s*\[default: (.*)\]$")  # of an option whose default depends on other options


def exit_codes() -> str:
    """Every exit code and its meaning."""
    return table(("code", "meaning"), ((str(code), meaning) for code, meaning in EXIT_CODES.items()))


def commands() -> str:
    """All commands by section, each with a link to its options."""
    rows = []
    for section, listed in main.sections.items():
        rows += [
            (section if place == 0 else "", f"[`ridgeplan {name}`](#ridgeplan-{name})", summary)
            for place, (name, (_, summary)) in enumerate((name, of) for name, of in listed.items() if of[1])
        ]
    return table(("", "command", "purpose"), rows)


def command_options() -> str:
    """A section for each command: usage, description, options and examples."""
    root = click.Context(main, info_name="ridgeplan", show_default=True)
    return "\n\n".join(part for context in _contexts(main, root, []) for part in _command(context))


def _contexts(
    group: LazyGroup | click.Group, parent: click.Context, seen: list[click.Command]
) -> Iterator[click.Context]:
    """The context of every command below a group; aliases of those that were `seen` are left out."""
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        if command is None or command in seen:
            continue
        seen.append(command)
        context = click.Context(command, info_name=name, parent=parent)
        yield context
        if isinstance(command, click.Group):
            yield from _contexts(command, context, seen)


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    level = "##" if context.parent and context.parent.parent is None else "###"
    yield f"{level} {context.command_path}"
    yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield _text(paragraph)
    options = [item for item in command.params if isinstance(item, click.Option) and not item.hidden]
    if options:
        yield table(("option", "value", "default", "description"), (_option(item, context) for item in options))
    lines = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]
    yield "\n".join(("```", *lines, "```"))


def _option(option: click.Option, context: click.Context) -> tuple[str, ...]:
    """Names, allowed values, default and description."""
    extra, text = option.get_help_extra(context), option.help or ""
    stated = STATED_DEFAULT.search(text)
    default = stated[1] if stated else "required" if option.required else str(extra.get("default", ""))
    names = ", ".join(f"`{name}`" for name in option.opts)
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    value = ", ".join(f"`{choice}`" for choice in choices) or _text(option.make_metavar(context))
    several = option.multiple and option.callback is not one_name and not re.search("repeat|a list", text, re.I)
    many = " Repeat it for several values." if several else ""
    return names, "" if option.is_flag else value, _text(default), _text(STATED_DEFAULT.sub("", text) + many)


def _text(text: str) -> str:
    """Text for a cell or a paragraph of Markdown; code in backticks stays as it is."""
    parts = text.split("`")
    escaped = [part if place % 2 else re.sub(r"([<>|*_\[\]])", r"\\\1", part) for place, part in enumerate(parts)]
    return "`".join(escaped)
