"""Registries of the classes that execute policies, by the names that plans use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


class Registry(dict[str, Any]):
    """Classes by the names of the policies that they execute."""

    def register(self, *names: str) -> Callable[[Class], Class]:
        """Class decorator: plans that name one of these policies are executed by the class."""

        def add(kind: Class) -> Class:
            self.update(dict.fromkeys(names, kind))
            return kind

        return add


SELECTORS = Registry()  # of what drafts or a target read
SCORERS = Registry()  # of evictions
