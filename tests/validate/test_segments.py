"""What is typical of a generation's segments, and when they say that the machine was busy. All times are made up."""

import pytest

from ridgeplan.validate.measure import Segment, is_busy, median_round_s, segment_tokens, spread_of, widest


def test_a_segments_round_is_its_share_and_the_median_ignores_a_minority() -> None:
    quiet = [Segment(0.08, 8)] * 6  # 10 ms a round
    slowed = [Segment(0.4, 4)] * 4  # 100 ms a round
    assert median_round_s(quiet + slowed) == pytest.approx(0.01)


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread_of([8, 9, 10, 11, 12]) == pytest.approx((11 - 9) / 10)
    assert spread_of([5, 5, 5, 5]) == 0


def test_too_few_values_have_no_spread() -> None:
    assert spread_of([1, 100, 1]) is None
    assert not is_busy(None)
    assert widest([None, None]) is None
    assert widest([0.1, None, 0.3]) == 0.3


def test_a_quiet_machine_with_one_slow_segment_is_not_busy_and_a_third_of_slow_ones_is() -> None:
    def spread(slow: int) -> float | None:
        return spread_of([1.0 + 0.01 * index for index in range(12 - slow)] + [10.0] * slow)

    assert not is_busy(spread(1))
    assert is_busy(spread(4))
    assert is_busy(spread(6))


def test_a_context_that_grows_by_a_tenth_is_not_noise() -> None:
    assert not is_busy(spread_of([1 + 0.1 * index / 9 for index in range(10)]))


@pytest.mark.parametrize(("new_tokens", "expected"), [(1, 1), (10, 1), (64, 7), (256, 26), (1000, 100)])
def test_a_generation_has_about_ten_segments(new_tokens: int, expected: int) -> None:
    assert segment_tokens(new_tokens) == expected
