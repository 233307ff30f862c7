"""The last context at which drafts win, as a search over every unit of 1024 tokens finds it."""

import pytest

from ridgeplan.planner.queries.drafter_range import UNIT, last_win


@pytest.mark.parametrize("last", [8 * UNIT, 128 * UNIT, 1000 * UNIT])
def test_the_last_win_is_that_of_a_search_over_every_unit(last: int) -> None:
    for end in range(0, last, max(UNIT, last // 40 // UNIT * UNIT)):
        assert last_win(lambda context, end=end: context <= end, last) == end
    assert last_win(lambda context: True, last) is None
    assert last_win(lambda context: context == last, last) is None


def test_few_contexts_are_priced() -> None:
    priced: list[int] = []

    def wins(context: int) -> bool:
        priced.append(context)
        return context <= 11 * UNIT

    assert last_win(wins, 1024 * UNIT) == 11 * UNIT
    assert len(priced) < 40


def test_a_context_shorter_than_a_unit_is_the_only_candidate() -> None:
    assert last_win(lambda context: True, 512) is None
    assert last_win(lambda context: False, 512) == 0
