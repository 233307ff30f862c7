"""Questions about given plans, grids and machines, one file per question."""
