"""Every word that answers use is explained."""

import pytest

from ridgeplan.planner import PRESETS, PlanError, Workload, preset
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.render.text import SOURCE_WORDS, explain, plain_words, terms
from ridgeplan.roofline.catalog.profile import SOURCES
from ridgeplan.roofline.plan.support import Backend


def test_every_source_word_is_explained() -> None:
    assert tuple(SOURCE_WORDS) == SOURCES
    assert all(explain(word) for word in SOURCES)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_explained(name: str) -> None:
    assert explain(name).startswith("A preset: ")


@pytest.mark.parametrize(("term", "kind"), [("quality", Quality), ("backend", Backend)])
def test_every_value_of_an_option_is_in_its_term(term: str, kind: type[Quality] | type[Backend]) -> None:
    assert [value for value in kind if f"{value}" not in explain(term)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("autoregressive", "plain decoding"),
        ("int8-weights-int8", "weights in 8 bits; the KV cache in 8 bits"),
        ("quantspec-weights", "4 tokens drafted at a time from 4-bit weights, then checked in one pass"),
        ("progressive-exact", "4 tokens drafted at a time from 4-bit weights, a 4-bit KV cache and a part of the "
         "context, then checked in one pass"),
        ("suffix", "tokens proposed by a drafter, then checked in one pass"),
        ("snapkv", "a part of the prompt dropped from the KV cache"),
    ],
)  # fmt: skip
def test_plain_words_name_what_a_plan_changes(name: str, words: str) -> None:
    assert plain_words(preset(name, Workload("any", "here", 8192, 64))) == words


def test_case_does_not_matter_and_near_words_are_named() -> None:
    assert explain("TPOT") == explain(" tpot ") == terms()["tpot"]
    with pytest.raises(PlanError, match=r"unknown term 'gama'\. Did you mean gamma"):
        explain("gama")


def test_words_of_answers_and_profiles_are_explained() -> None:
    assert all(explain(word) for word in (*Quality, "spread"))


# The source or the idea that only the policy's own sentence names.
@pytest.mark.parametrize(
    ("name", "text"), [("specextend", "Cha et al."), ("dapq", "Pseudo queries"), ("progressive-target", "2-bit keys")]
)
def test_a_preset_says_which_tokens_its_policy_keeps(name: str, text: str) -> None:
    assert text in explain(name)
    assert text not in explain("quantspec")


@pytest.mark.parametrize("name", ["w8", "w8+int8", "int4x2+upper/w4", "w8+suffix", "w8+bf16+int4+upper+suffix/w4"])
def test_plans_are_explained_by_the_names_in_tables(name: str) -> None:
    assert explain(name).startswith("A plan: ")
