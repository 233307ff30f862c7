"""What every operation costs, how long it takes on a machine, and what fits its memory."""
