"""`ridgeplan study`: measurements behind the papers' claims, on the user's model and text, one file per study.

Not here: the measurements themselves (validate/studies).
"""

import click


@click.group()
def study() -> None:
    """Measure what the papers' methods rest on, with your model and text."""
