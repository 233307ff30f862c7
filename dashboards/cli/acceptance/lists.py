"""Options that take a list of values: `--ctx 4096 8192` as well as `--ctx 4096 --ctx 8192`."""

from __future__ import annotations

from collections.abc import Iterator

import click


class ListCommand(click.Command):
    """A command whose `multiple` options take all values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        lists = {name for one in self.params if isinstance(one, click.Option) and one.multiple for name in one.opts}
        return super().parse_args(ctx, list(_repeated(args, lists)))


def _repeated(args: list[str], lists: set[str]) -> Iterator[str]:
    """The arguments, with the option's name before every further value of a list."""
    option, taken = "", False
    for arg in args:
        if arg.startswith("-"):
            option, taken = arg if arg in lists else "", False
        elif option:
            if taken:
                yield option
            taken = True
        yield arg
