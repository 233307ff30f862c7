"""Policies of token selection and eviction. Every module here is imported, which registers the policies in it.

A new policy is a class decorated with `@policy` in a module of this folder, and the class that executes it in
runtime/policies.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
