"""Groups of commands that are imported when they are asked for, and whose errors are one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

Sections = Mapping[str, Mapping[str, tuple[str, str]]]


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class OneLineGroup(click.Group):
    """A group of commands whose errors are one line and whose exit code is 0, 2, 3, 4 or 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Like click's own, which would print errors over several lines."""
        from ridgeplan.dashboards.cli.errors import exit_code
        from ridgeplan.dashboards.cli.streams import prepare_process

        run = super().main

        def command() -> Any:
            prepare_process()
            return run(*args, **{"prog_name": "ridgeplan", **kwargs, "standalone_mode": False})

        raise SystemExit(exit_code(command))


class LazyGroup(OneLineGroup):
    """Such a group whose commands are listed by section and imported by name.

    sections: of each a title, and its commands: "module:attribute" below `package`, and what the list says of it; a
    command without that is not listed.
    """

    def __init__(self, *args: Any, package: str = "", sections: Sections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.package, self.sections = package, sections or {}

    def _known(self) -> Iterator[tuple[str, tuple[str, str]]]:
        for commands in self.sections.values():
            yield from commands.items()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, aliases too."""
        return [name for name, _ in self._known()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported now."""
        place = next((place for name, (place, _) in self._known() if name == cmd_name), None)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        found: click.Command = getattr(import_module(f"{self.package}.{module}"), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's own; for a name that is not known it says which are near."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.list_commands(ctx), n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"no command {args[0][:40]!r}.{hint} `{ctx.command_path} --help` lists them")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of verbs, for which none is imported, and options."""
        listed = [CompletionItem(name, help=told) for name, (_, told) in self._known() if name.startswith(incomplete)]
        return [*listed, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, for which none is imported."""
        for title, commands in self.sections.items():
            rows = [(name, told) for name, (_, told) in commands.items() if told]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=12)
