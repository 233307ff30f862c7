"""Groups whose commands are imported when they run: their classes, `bench`, `study`, and shell completion."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

HERE = "ridgeplan.dashboards.cli"
COMMANDS = Path(__file__).with_name("commands.toml")


class ThoroughCommand(click.Command):
    """A command that names every wrong option at once, where click stops at the first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does. Raises UsageError for several wrong options."""
        words, mistakes = list(args), []
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter:
            given, _, order = self.make_parser(ctx).parse_args(list(words))
            for param in click.core.iter_params_for_processing(order, self.get_params(ctx)):
                try:
                    param.handle_parse_result(ctx, given, [])
                except click.BadParameter as error:
                    mistakes.append(error.format_message())
            mistakes += _planner_mistakes(ctx)
            if len(mistakes) == 1:
                raise
        from ridgeplan.roofline.catalog.validation import numbered  # which --help does without

        raise click.UsageError(numbered(mistakes), ctx)


def _planner_mistakes(ctx: click.Context) -> Sequence[str]:
    """What the planner says of the options that click could parse, of commands whose options are the planner's."""
    from ridgeplan.planner import SearchOptions

    source, known = ctx.get_parameter_source, vars(SearchOptions()) if "memory_utilization" in ctx.params else ()
    given = {name: value for name, value in ctx.params.items() if source(name) is ParameterSource.COMMANDLINE}
    try:
        SearchOptions(**{name: given[name] for name in known if name in given})
    except ValueError as error:
        return getattr(error, "mistakes", (str(error),))
    return ()


def command(name: str | None = None, *, cls: type[click.Command] = ThoroughCommand, **settings: Any) -> Any:
    """A decorator that makes a command or a group. The docstring is its help, and what follows "Examples:" its end."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        text, _, lines = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        return click.command(name, cls, help=text, epilog=f"\b\nExamples:\n{lines}", **settings)(function)

    return decorate


class OneLineGroup(click.Group):
    """A group whose errors are one line and whose exit codes are those of `errors.EXIT_CODES`."""

    def main(self, args: Sequence[str] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs as click does, which would print errors over several lines."""
        from ridgeplan.dashboards.cli.errors import exit_code, prepare_process, require_utf8
        from ridgeplan.dashboards.cli.output import warnings_as_notes

        run, words = super().main, sys.argv[1:] if args is None else args

        def command() -> Any:
            prepare_process()
            require_utf8(words)
            with warnings_as_notes():
                return run(words, **{"prog_name": "ridgeplan", **kwargs, "standalone_mode": False})

        raise SystemExit(exit_code(command))


class LazyGroup(OneLineGroup):
    """A group whose commands, those of a table of commands.toml, are listed by section and imported by name."""

    def __init__(self, *args: Any, table: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    @cached_property
    def sections(self) -> Mapping[str, Mapping[str, tuple[str, str]]]:
        """By title and name, each command's "module:attribute" in this folder and its summary; an alias has none."""
        sections: Mapping[str, Mapping[str, tuple[str, str]]]
        sections = tomllib.loads(COMMANDS.read_text(encoding="utf-8"))[self.table]
        return sections

    def _entries(self) -> dict[str, tuple[str, str]]:
        return {name: entry for commands in self.sections.values() for name, entry in commands.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, aliases included."""
        return list(self._entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command of a name; None for an unknown one."""
        if cmd_name not in self._entries():
            return None
        module, _, attribute = self._entries()[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{HERE}.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves as click does, and suggests near names for an unknown one."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.list_commands(ctx), n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"no command {args[0][:40]!r}.{hint} `{ctx.command_path} --help` lists all commands")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes verbs, without importing any, and options."""
        entries = self._entries().items()
        verbs = [CompletionItem(name, help=summary) for name, (_, summary) in entries if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands by section, without importing any."""
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items() if text], col_max=12)


@command(cls=LazyGroup, table="bench")
def bench() -> None:
    """Time this machine's kernels, decoding and planner.

    Examples:
      ridgeplan bench planner
      ridgeplan bench kernels
      ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 32k
    """


@command(cls=LazyGroup, table="study")
def study() -> None:
    """Test the papers' claims on your model and text.

    Examples:
      ridgeplan study drafts --text book.txt --ctx 4k
      ridgeplan study dapq
      ridgeplan study dapq --help
    """


@command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and their values in SHELL.

    Examples:
      eval "$(ridgeplan completion bash)"
      ridgeplan completion zsh > ~/.zfunc/_ridgeplan
      ridgeplan completion fish > ~/.config/fish/completions/ridgeplan.fish
    """
    from ridgeplan.dashboards.cli.output import echo

    completer = get_completion_class(shell)
    if completer is None:
        raise click.UsageError(f"no completion for {shell!r}")
    echo(completer(ctx.find_root().command, {}, "ridgeplan", "_RIDGEPLAN_COMPLETE").source())
