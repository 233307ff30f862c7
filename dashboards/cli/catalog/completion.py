"""`ridgeplan completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ridgeplan.dashboards.cli.lazy_group import examples


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
