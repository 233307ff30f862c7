"""Selectors of cached tokens for drafts or a sparse target, by the names that plans use.

base.py has the interface and what several selectors share. All files of this folder are imported and their classes
register themselves: a new selector is one file here and one entry in roofline/plan/policies.
Not here: hyperparameters and costs (roofline/plan), and how often drafts are accepted (planner/acceptance).
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import SELECTORS, TokenSelector
from ridgeplan.runtime.retrieval.head import Head

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def token_selector(selection: Any, builder: AttentionMetadataBuilder, head: Head | None = None) -> TokenSelector:
    """The selector that executes a plan's selection on one cache.

    head: the model's retrieval head. Raises WorkloadError where the selection needs one and there is none.
    """
    selector = SELECTORS[selection.name]
    arguments = (head,) if selector.uses_head else ()
    return selector(selection, builder, *arguments)


__all__ = ["SELECTORS", "TokenSelector", "token_selector"]
