"""Effects: how a draft's figures enter the regression."""

import math

import pytest

from ridgeplan.planner.acceptance.effects import Subject, log_ratio_factor, place_of


def part(draft="kv4", context=8192, dtype="float32", **more):
    (only_part,) = Subject((draft,), "owner/Model-1B-Instruct.Q4_1", 2.0, context, "gptq", dtype, **more).parts
    return only_part


def test_a_model_shares_its_effect_with_its_tunings_and_has_one_of_its_own():
    effects = part()
    assert effects["model", "model-1b", "kv"] == 1
    assert effects["tuning", "model-1b-instruct", "kv"] == 1
    assert effects["size", "kv"] == 1  # twice the reference of a billion


def test_octaves_of_context_and_position():
    effects = part(context=65536, position=4)
    assert effects["context", "kv"] == pytest.approx(3)
    assert effects["position", "kv"] == pytest.approx(2)


def test_octaves_of_stretched_positions():
    assert part(yarn=4.0)["stretch", "kv"] == pytest.approx(2)
    assert ("stretch", "kv") not in part()


def test_contexts_do_not_matter_to_what_each_query_selects():
    assert part("streamingllm", context=65536, ratio=0.1)["context", "tokens"] == pytest.approx(3)
    assert ("context", "tokens") not in part("quest", context=65536, ratio=0.1)


def test_size_matters_to_bits_and_not_to_tokens():
    assert not any(effect[0] == "size" for effect in part("quest", ratio=0.1))


def test_a_context_lies_between_two_places():
    """16384 is halfway, in log, between the places of 8192 and of 32768."""
    effects = part(context=16384)
    assert place_of(16384) == pytest.approx(0.5)
    assert [effects["place", "model-1b", "kv4", place] for place in "01"] == pytest.approx([0.5, 0.5])


def test_beyond_the_models_rows_the_last_place_stays_and_the_distance_counts():
    spans = {"kv4": (place_of(2048), place_of(32768))}
    effects = part(context=32768 * 64, spans=spans)
    assert effects["place", "model-1b", "kv4", "1"] == pytest.approx(1)
    assert effects["place", "model-1b", "kv4", "beyond"] == pytest.approx(3)  # 64 is 4^3
    assert not any(effect[-1] == "beyond" for effect in part(context=8192, spans=spans))


def test_the_ratio_enters_as_the_logarithm_of_the_tokens_left_out():
    """ln(1/ratio) of a sixteenth is twice, of a half is half that of a quarter; of all tokens it is none."""
    assert log_ratio_factor(1 / 16) == pytest.approx(math.log(2))
    assert log_ratio_factor(1 / 2) == pytest.approx(-math.log(2))
    assert log_ratio_factor(1 / 4) == pytest.approx(0)
    assert math.exp(log_ratio_factor(1.0)) < 1e-8


@pytest.mark.parametrize(
    "draft, ageing",
    [
        ("specattn", "once a round"),
        ("specextend", "once a round"),
        ("streamingllm", "each step"),
        ("quest", "each step"),
        ("w4", "w4"),
    ],
)
def test_sets_chosen_once_a_round_age_with_its_positions(draft, ageing):
    assert part(draft, position=2, ratio=0.1)["position", ageing] == 1


def test_only_weights_have_a_quantizer_and_only_selections_a_ratio():
    assert part("w4")["quantizer", "gptq"] == 1
    assert not any(effect[0] in ("quantizer", "ratio", "policy") for effect in part("kv4"))
    assert part("quest", ratio=0.1)["policy", "quest"] == 1


def test_eight_bits_are_four_and_what_they_add():
    """Runs and places are of one draft each."""
    assert part("kv8")["eight bits",] == 1
    added = ("eight bits", "run", "place")
    four, eight = ({effect for effect in part(draft) if effect[0] not in added} for draft in ("kv4", "kv8"))
    assert four == eight


def test_bfloat16_has_a_part_of_its_own():
    parts = Subject(("kv4",), "m", 1.0, 8192, "gptq", "bfloat16").parts
    assert len(parts) == 2
    assert parts[1]["level", "bfloat16"] == 1
