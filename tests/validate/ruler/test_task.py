"""Scores of answers, and the search for the largest sample that fits."""

import pytest

from ridgeplan.validate.quality.ruler_samples import Material, Sample, Task, TaskError, sample_that_fits

NOTHING = Material((), (), {})


def words(material: Material, size: int, generator) -> Sample:
    return Sample(" ".join([str(generator.randrange(10))] * size), "", ("x",))


def test_every_answer_counts_its_share_or_one_is_enough():
    each, one = Task("t", words, 8), Task("t", words, 8, any_answer=True)
    answers = ("Red", "green", "blue", "grey")
    assert each.score("it is RED, then Blue.", answers) == 0.5
    assert one.score("it is RED, then Blue.", answers) == 1.0
    assert each.score("none", answers) == one.score("none", answers) == 0.0
    assert each.score("red green blue grey", answers) == 1.0


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 1023])
def test_the_largest_sample_that_fits_is_found(most):
    counted = []

    def count(sample: Sample) -> int:
        counted.append(len(sample.prompt.split()))
        return counted[-1]

    found = sample_that_fits(Task("t", words, 8), NOTHING, "seed", count, most)
    assert len(found.prompt.split()) == most
    assert len(counted) < 30


def test_sizes_whose_tokens_grow_in_steps_are_found_too():
    found = sample_that_fits(Task("t", words, 8), NOTHING, "s", lambda one: len(one.prompt.split()) // 7 * 7, 100)
    assert len(found.prompt.split()) == 104  # 105 words count as 105 tokens, 98 to 104 as 98


def test_a_context_that_is_too_short_is_named():
    with pytest.raises(TaskError, match="t takes 40 tokens at least; allowed by the context: 39"):
        sample_that_fits(Task("t", words, 8), NOTHING, "s", lambda one: 39 + len(one.prompt.split()), 39)
