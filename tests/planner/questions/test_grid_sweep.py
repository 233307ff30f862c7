"""A sweep's rows are the answers of single questions, in the order of its axes."""

from typing import Any

import pytest

from ridgeplan.planner import PlanError
from ridgeplan.planner.queries.maps import plan_map
from ridgeplan.planner.queries.sweep import grid_sweep, parse_axes
from ridgeplan.planner.question import ask

LLAMA = "meta-llama/Llama-3.1-8B"


def test_axes_are_read_with_their_values() -> None:
    found = parse_axes("ctx=4k..16k,batch=1,4,gpu=h100,h200,new-tokens=1k,memory-limit=24GB,40GB")
    assert found == {
        "ctx": (4096, 8192, 16384), "batch": (1, 4), "gpu": ("h100", "h200"), "new_tokens": (1024,),
        "memory_limit": ("24GB", "40GB"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no axis; allowed: such as ctx=4k..1M,batch=1..64"),
        ("4k..8k", "is not a grid"),
        ("ctx=", "is not a grid"),
        ("width=3", "axis 'width'; allowed: each of ctx, batch"),
        ("ctx=4k,batch=1,ctx=8k", "axis 'ctx'; allowed: each of"),
        ("batch=4k", "'4k' is not a whole number"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        parse_axes(text)
    assert words in str(refusal.value)


def test_every_point_is_the_answer_to_its_question() -> None:
    over = {"gpu": ("h100", "h200"), "quality": ("exact", "near-lossless"), "ctx": (4096, 32_768), "batch": (1, 16)}
    rows = grid_sweep(LLAMA, "", over, new_tokens=256).table()
    asked = [(row["gpu"], row["quality"], row["context"], row["batch"]) for row in rows]
    assert asked == [
        (gpu, quality, context, batch)
        for gpu in ("h100-sxm", "h200") for quality in ("exact", "near-lossless")
        for context in (4096, 32_768) for batch in (1, 16)
    ]  # fmt: skip
    for row in rows[::5]:
        question = ask(LLAMA, row["gpu"], 1, quality=row["quality"], new_tokens=256)
        one = plan_map(question, (row["context"],), (row["batch"],))
        assert row["tpot_ms"] == pytest.approx(1e3 * one.tpot_s[0, 0])
        assert row["plan"] == one.names[0, 0]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / one.tpot_s[0, 0])


def test_what_does_not_vary_is_as_given() -> None:
    (row,) = grid_sweep(LLAMA, "h200", {"preset": ("int8",)}, context="16k", batch=3).table()
    assert (row["preset"], row["plan"], row["context"], row["batch"]) == ("int8", "int8", 16_384, 3)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"width": (1,)}, "unknown axis width; allowed: ctx, batch"),
        ({"ctx": range(1, 1000), "batch": range(1, 1000)}, "the grid has 998001 points; allowed: up to 100000"),
    ],
)
def test_grids_out_of_range_are_refused(over: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as refusal:
        grid_sweep(LLAMA, "h200", over)
    assert words in str(refusal.value)


def test_contexts_beyond_the_limit_are_stretched_by_yarn() -> None:
    """Llama-3.1's limit is 131072; each context has the factor that its own last token needs."""
    swept = grid_sweep(LLAMA, "h200", {"ctx": (8192, 262_144)}, yarn=True)
    (point,) = swept.points
    assert [row["context"] for row in swept.table()] == [8192, 262_144]
    assert [point.found.plan(row, 0).workload.yarn_factor for row in (0, 1)] == [1.0, 2.5]


def test_contexts_beyond_the_limit_are_marked_and_the_others_answered() -> None:
    """The rows of 8k are those of a sweep of 8k alone; those of 256k have no figures and say why."""
    swept = grid_sweep(LLAMA, "h200", {"ctx": (262_144, 8192), "batch": (1, 4)})
    beyond, answered = swept.table()[:2], swept.table()[2:]
    assert answered == grid_sweep(LLAMA, "h200", {"ctx": (8192,), "batch": (1, 4)}).table()
    assert [(row["context"], row["batch"], row["fits"]) for row in beyond] == [(262_144, 1, False), (262_144, 4, False)]
    assert {value for row in beyond for name, value in row.items() if name.endswith(("_ms", "_s", "_bytes"))} == {None}
    (longest,) = grid_sweep(LLAMA, "h200", {"ctx": (131_072,)}).table()
    assert longest["plan"]
    assert {row["why_not"] for row in beyond} == {"beyond the model's limit of 131072; --yarn stretches it"}
    assert [list(row) for row in beyond] == [list(row) for row in answered]
    assert "4 questions, 2 fit" in swept.summary()


def test_models_have_limits_of_their_own() -> None:
    """SmolLM2's limit is 8192 tokens, Llama-3.1's 131072; where no model reaches any context, nothing is answered."""
    models = ("HuggingFaceTB/SmolLM2-135M", LLAMA)
    rows = grid_sweep("", "h200", {"model": models, "ctx": (65_536,)}).table()
    assert [(row["model"], row["plan"] != "") for row in rows] == list(zip(models, (False, True), strict=True))
    with pytest.raises(PlanError, match="every context is beyond the model's limit of 8192"):
        grid_sweep(models[0], "h200", {"ctx": (16_384, 65_536)})
