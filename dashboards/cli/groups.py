"""Groups of commands, imported when asked for: their classes, `bench`, `study`, and completion in a shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

Sections = Mapping[str, Mapping[str, tuple[str, str]]]


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class OneLineGroup(click.Group):
    """A group of commands whose errors are one line and whose exit code is 0, 2, 3, 4 or 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Like click's own, which would print errors over several lines."""
        from ridgeplan.dashboards.cli.errors import exit_code, prepare_process

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


HERE = "ridgeplan.dashboards.cli"
BENCHMARKS = {
    "Benchmarks": {
        "kernels": ("bench:kernels", "This machine's kernels beside their peers."),
        "decode": ("bench_decode:decode", "Decoding at a large model's size, beside plain decoding."),
        "suite": ("bench_decode:suite", "The same over workloads, presets and gammas."),
        "planner": ("bench:planner", "How fast the planner answers."),
    }
}
STUDIES = {
    "Studies": {
        "drafts": ("study:drafts", "How often sparse drafts are accepted, by policy and ratio."),
        "retrieval": ("study:retrieval", "What selections find of what the model attends to."),
        "dapq": ("study:dapq", "Whether queries follow positions more than content."),
    }
}


@click.group(
    cls=LazyGroup, package=HERE, sections=BENCHMARKS,
    epilog=examples(
        "ridgeplan bench planner", "ridgeplan bench kernels",
        "ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 32k",
    ),
)  # fmt: skip
def bench() -> None:
    """Measure this machine's speed against other software's."""


@click.group(
    cls=LazyGroup, package=HERE, sections=STUDIES,
    epilog=examples(
        "ridgeplan study drafts --text book.txt --ctx 4k", "ridgeplan study dapq", "ridgeplan study dapq --help"
    ),
)  # fmt: skip
def study() -> None:
    """Measure what the papers' methods rest on, with your model and text."""


@click.command(
    epilog=examples(
        'eval "$(ridgeplan completion bash)"',
        "ridgeplan completion zsh > ~/.zfunc/_ridgeplan",
        "ridgeplan completion fish > ~/.config/fish/completions/ridgeplan.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and their values in SHELL."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell!r}")
    click.echo(kind(ctx.find_root().command, {}, "ridgeplan", "_RIDGEPLAN_COMPLETE").source())
