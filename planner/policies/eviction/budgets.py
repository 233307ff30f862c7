"""How many of a prompt's tokens each layer keeps, given the layers' budgets."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_budgets(budgets: Sequence[int], budget: int, group: int) -> tuple[int, ...]:
    """Budgets moved to the nearest that differ from `budget` by whole groups.

    Rows then reach the end of a group in all layers at once, and a round never has to end for one layer alone. A budget
    that would become 0 or less is the smallest positive one.
    """
    moved = (budget + round((each - budget) / group) * group for each in budgets)
    return tuple(each if each > 0 else (budget - 1) % group + 1 for each in moved)


def kept_tokens(tokens: int, budgets: Sequence[int], group: int) -> tuple[int, ...]:
    """Tokens of a prompt of `tokens` that each layer keeps: at least 1, and as many as others up to whole groups.

    budgets: as `aligned_budgets` makes them. A layer keeps at most its budget, or a group where the budget is smaller.
    """
    longest = min(tokens, max(budgets))
    evicted = (-(-max(longest - budget, 0) // group) * group for budget in budgets)
    kept = (longest - each for each in evicted)
    return tuple(each if each > 0 else each + group for each in kept)
