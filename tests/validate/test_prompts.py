"""Prompt texts and files."""

from pathlib import Path

import pytest

from ridgeplan.runtime.errors import ModelError
from ridgeplan.validate.prompts import (
    MAX_CHARACTERS,
    PromptError,
    first_tokens,
    prompt_batch,
    prompt_tokens,
    random_batch,
    read_prompt,
    sample_text,
)


class WordTokenizer:
    """One token per word, so that texts have a known number of tokens."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_the_sample_text_is_long_prose() -> None:
    text = sample_text()
    assert len(text) > 300_000
    assert "expression" in text


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_a_prompt_has_exactly_the_tokens_asked_for(tokens: int) -> None:
    expected = WordTokenizer().encode(sample_text())[:tokens]
    assert prompt_tokens(WordTokenizer(), tokens) == expected


def test_long_words_do_not_make_a_prompt_short() -> None:
    text = "incomprehensibilities " * 50
    assert prompt_tokens(WordTokenizer(), 50, text) == [21] * 50


def test_a_text_that_is_too_short_names_both_lengths() -> None:
    with pytest.raises(PromptError, match=r"has 3 tokens; needed: 4"):
        prompt_tokens(WordTokenizer(), 4, "one two three")


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Grüße, 世界\n", encoding="utf-8")
    assert read_prompt(path) == "Grüße, 世界\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read text file"), (b"", "is empty"), (b" \n\t", "is empty"), (b"ab\xff", "byte 2 is wrong")],
    ids=["missing", "empty", "blank", "not UTF-8"],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message) as error:
        read_prompt(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot read text file"):
        read_prompt(tmp_path)


def test_a_file_without_end_is_read_up_to_the_longest_context() -> None:
    with pytest.raises(PromptError, match=f"'/dev/zero' is too long; allowed: up to {MAX_CHARACTERS} characters"):
        read_prompt("/dev/zero")


def test_no_more_of_a_text_is_encoded_than_is_asked_for() -> None:
    class Counting(WordTokenizer):
        longest = 0

        def encode(self, text: str) -> list[int]:
            self.longest = max(self.longest, len(text))
            return super().encode(text)

    tokenizer = Counting()
    assert first_tokens(tokenizer, 100, "word " * 100_000) == [4] * 100
    assert tokenizer.longest == 600
    assert first_tokens(tokenizer, 100, "one two") == [3, 3]


def test_a_tokenizer_that_fails_on_a_text_is_one_line() -> None:
    class Failing:
        def encode(self, text: str) -> list[int]:
            raise Exception("WordLevel error: Missing [UNK] token")  # what tokenizers raises has no type of its own

    with pytest.raises(ModelError, match=r"tokenizer cannot encode the text: WordLevel error: Missing \[UNK\] token"):
        first_tokens(Failing(), 4, "a")


def test_random_prompts_are_of_the_vocabulary_and_the_same_every_time():
    batch = random_batch(50, 2000, 3)
    assert [len(prompt) for prompt in batch] == [2000] * 3
    assert set(batch[0]) == set(range(50))
    assert batch[0] != batch[1]
    assert random_batch(50, 2000, 3) == batch


def test_a_batch_is_spread_over_the_whole_text() -> None:
    text = " ".join("a" * length for length in range(1, 102))
    assert prompt_batch(WordTokenizer(), 5, 3, text) == [[*range(start, start + 5)] for start in (1, 49, 97)]
    assert prompt_batch(WordTokenizer(), 101, 1, text) == [[*range(1, 102)]]
    with pytest.raises(PromptError, match="101 tokens; needed: 102, for 3 parts of 100"):
        prompt_batch(WordTokenizer(), 100, 3, text)


def test_each_prompt_of_a_batch_begins_as_texts_do() -> None:
    class WithStart(WordTokenizer):
        bos_token_id = 900

        def encode(self, text: str) -> list[int]:
            return [self.bos_token_id, *super().encode(text)]

    text = " ".join("a" * length for length in range(1, 102))
    assert prompt_batch(WithStart(), 5, 2, text) == [[900, 1, 2, 3, 4], [900, 98, 99, 100, 101]]


def test_the_last_token_is_whole_although_the_text_is_cut() -> None:
    """Six characters a token are read first; the last word among them would be a shorter one."""
    assert first_tokens(WordTokenizer(), 2, "abcdef ghijklmnop qr") == [6, 10]
