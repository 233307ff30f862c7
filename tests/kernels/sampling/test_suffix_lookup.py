"""Suffix lookup: the reference against a search in Python, the kernel against the reference."""

import pytest
import torch

from ridgeplan.kernels.sampling import suffix_lookup_triton as triton
from ridgeplan.kernels.sampling.suffix_lookup import suffix_lookup
from ridgeplan.roofline.execution import MAX_SUFFIX_TOKENS

pytestmark = pytest.mark.usefixtures("poisoned_empty")
DEPTH = 5


def search(text: list[int], depth: int, min_match: int) -> list[int]:
    """The proposals by their definition: the longest match, of equal ones the latest; [] without one."""

    def matched(end: int) -> int:
        count = 0
        while count < min(end, MAX_SUFFIX_TOKENS) and text[end - 1 - count] == text[-1 - count]:
            count += 1
        return count

    ends = [end for end in range(1, len(text)) if matched(end) >= min_match]
    if not ends:
        return []
    end = max(ends, key=lambda end: (matched(end), end))
    return [text[end + place % (len(text) - end)] for place in range(depth)]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_proposals_follow_the_longest_and_latest_match(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts of three tokens, of every length from 1; one repeats itself. What follows a text is not read."""
    monkeypatch.setattr(triton, "LOOKUP_CHUNK", 32)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, (41, 60), generator=generator, dtype=torch.int32)
    text[40, :30] = torch.arange(30) % 4 + 3
    text[39] = torch.arange(60)
    lengths = torch.tensor([*range(1, 41), 30], dtype=torch.int32)
    if backend == "triton":  # the interpreter is slow
        text, lengths = text[4::6], lengths[4::6]
    for min_match in (1, 3):
        tokens, counts = suffix_lookup(text.to(device), lengths.to(device), DEPTH, min_match, backend=backend)
        expected = [search(row[:length].tolist(), DEPTH, min_match) for row, length in zip(text, lengths, strict=True)]
        assert counts.tolist() == [len(each) for each in expected]
        assert [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)] == expected
        assert 0 < sum(map(bool, expected)) < len(expected)
        assert ((tokens >= 0) & (tokens < 60)).all()
    assert expected[-1] == [5, 6, 3, 4, 5]
