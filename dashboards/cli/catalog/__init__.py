"""Commands that list what the package knows: models, GPUs, and the papers' published tables.

Not here: the catalogs themselves (roofline/catalog, planner/published).
"""
