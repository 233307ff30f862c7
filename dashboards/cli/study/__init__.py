"""`ridgeplan study`: measurements behind the papers' claims, on the user's model and text, one file per study.

The command line puts them into the group (dashboards/cli/__init__.py).
Not here: the measurements themselves (validate/studies).
"""

import click


@click.group()
def study() -> None:
    """Measure what the papers' methods rest on, with your model and text."""
