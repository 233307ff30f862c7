"""The study of sparse drafts: what it measures on a tiny model, by values that follow from what a draft reads."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Plan, Speculation, Workload
from ridgeplan.roofline.plan.policies.selections import SpecAttnWeights
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.runtime.model.checkpoint import load_tensor
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of, save_head
from ridgeplan.validate.acceptance import Passage
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.studies import drafts as drafts_module
from ridgeplan.validate.studies.drafts import (
    GAMMA,
    RoundCounts,
    SavedStudy,
    StudyDraft,
    StudyRow,
    acceptance_rows,
    drafts_of,
    study,
)

TEXT = "It was the best of times, it was the worst of times. " * 60
CONTEXT, TOKENS = 300, 32  # 300 to 332 tokens: codes of 128, and of 256 from 384 on
CHOOSING = 0.6  # of 300 tokens, of which 132 are always read


@pytest.fixture(scope="module")
def agreement_of(tiny_folder):
    question = [
        StudyDraft("all", 1.0, "bf16"),
        StudyDraft("all", 1.0, "kv4"),
        *(StudyDraft(name, 0.999, "bf16") for name in ("specattn-weights", "hindsight", "streamingllm", "snapkv")),
        *(StudyDraft(name, 0.999, "kv4") for name in ("quest", "progressive", "oracle")),
        StudyDraft("specattn-weights", CHOOSING, "bf16"),
        StudyDraft("hindsight", CHOOSING, "bf16"),
        StudyDraft("streamingllm", CHOOSING, "bf16"),
    ]
    passage = Passage(TEXT, "cities", (CONTEXT,), TOKENS)
    measured = study(str(tiny_folder), passage, question, device="cpu", verification="teacher-forced")
    return {(row.draft.policy, row.draft.ratio, row.draft.format): row for row in measured}


def test_a_draft_that_reads_what_its_target_reads_is_always_accepted(agreement_of):
    everything = agreement_of["all", 1.0, "bf16"]
    assert everything.by_position == pytest.approx([1.0] * GAMMA, abs=1e-5)
    assert everything.tokens_per_round == pytest.approx(GAMMA + 1, abs=1e-4)
    assert everything.rounds == TOKENS // 8 - 1  # the first is not counted


def test_policies_that_may_read_everything_agree_with_drafts_that_do(agreement_of):
    for policy in ("specattn-weights", "hindsight", "streamingllm", "snapkv"):
        assert agreement_of[policy, 0.999, "bf16"].mean == pytest.approx(1.0, abs=2e-3), policy
    for policy in ("quest", "progressive", "oracle"):
        assert agreement_of[policy, 0.999, "kv4"].mean == pytest.approx(
            agreement_of["all", 1.0, "kv4"].mean, abs=2e-3
        ), policy


def test_fewer_tokens_agree_less(agreement_of):
    for policy in ("specattn-weights", "hindsight", "streamingllm"):
        assert agreement_of[policy, CHOOSING, "bf16"].mean < agreement_of[policy, 0.999, "bf16"].mean - 1e-3
    assert agreement_of["hindsight", CHOOSING, "bf16"].mean >= agreement_of["streamingllm", CHOOSING, "bf16"].mean


def test_tokens_of_a_round_are_one_and_each_draft_whose_predecessors_are_accepted():
    measured = StudyRow.of(StudyDraft("quest", 0.1, "bf16"), 100, RoundCounts(3, (3, 3), (1.5, 2.4)))
    assert measured.mean == pytest.approx(0.65)
    assert measured.tokens_per_round == pytest.approx(1 + 0.5 + 0.5 * 0.8)


def test_every_combination_is_measured_and_formats_without_selection():
    drafts = drafts_of(("specattn-heads", "quest"), (0.03, 0.07), ("bf16", "w4kv4"))
    assert drafts[0] == StudyDraft("all", 1.0, "w4kv4")
    assert len(drafts) == len(set(drafts)) == 1 + 2 * 2 * 2
    assert drafts[1].selection == SpecAttnWeights(ratio=0.03, floor=0, per_kv_head=True)


@pytest.mark.parametrize(
    "question, message",
    [
        ((("best",), (0.1,), ("bf16",)), "policy is 'best'; allowed: streamingllm, snapkv"),
        ((("quest",), (0.1,), ("fp8",)), "format is 'fp8'; allowed: bf16, kv4, w4kv4"),
        ((("quest",), (1.0,), ("bf16",)), "ratio is 1.0; allowed: above 0 and below 1"),
    ],
)
def test_wrong_names_and_ratios_are_named(question, message):
    with pytest.raises(WorkloadError, match=message):
        drafts_of(*question)


def test_drafts_with_nothing_to_choose_are_named_and_not_measured(tiny_folder):
    assert StudyDraft("quest", 0.44, "bf16").starved_at(CONTEXT)  # 132 tokens: four sinks and 128 recent ones
    assert not StudyDraft("quest", 0.45, "bf16").starved_at(CONTEXT)
    assert not StudyDraft("all", 1.0, "kv4").starved_at(1)
    question = [StudyDraft("streamingllm", ratio, "bf16") for ratio in (0.1, 0.4, 0.6)]
    with pytest.warns(UserWarning, match="not measured at 300 tokens: streamingllm at 0.1, 0.4, whose"):
        passage = Passage(TEXT, "cities", (CONTEXT,), 16)
        rows = list(study(str(tiny_folder), passage, question, device="cpu", verification="teacher-forced"))
    assert [row.draft.ratio for row in rows] == [0.6]


def test_fewer_tokens_than_two_rounds_are_refused_before_anything_is_loaded():
    for tokens, verification, allowed in ((8, "teacher-forced", 16), (16, "sampled", 24), (16, "greedy", 24)):
        passage, draft = Passage(TEXT, "cities", (CONTEXT,), tokens), StudyDraft("quest", 0.6, "bf16")
        with pytest.raises(WorkloadError, match=f"tokens is {tokens}; allowed: {allowed} or more"):
            next(study("no model", passage, [draft], verification=verification))


# Rounds that drop rejected drafts.


@pytest.fixture(scope="module")
def real_rounds(tiny_folder):
    """Sampled and greedy rounds after two passages; drafts of sparse tokens are often rejected by a random model."""

    def measured(verification, *names):
        question = [
            StudyDraft("all", 1.0, "bf16"),
            StudyDraft("all", 1.0, "kv4"),
            *(StudyDraft(name, CHOOSING, "bf16") for name in names),
            StudyDraft("quest", CHOOSING, "kv4"),
        ]
        passage = Passage(TEXT, "cities", (CONTEXT,), 32)
        rows = study(str(tiny_folder), passage, question, "cpu", verification=verification, passages=2)
        return {(row.draft.policy, row.draft.format): row for row in rows}

    return {
        "sampled": measured("sampled", "specextend", "specattn-accepted", "streamingllm", "snapkv"),
        "greedy": measured("greedy", "specextend-last", "specattn-eq2"),
    }


def test_sampled_rounds_count_drafts_up_to_the_first_rejected_one(real_rounds):
    for row in real_rounds["sampled"].values():
        assert row.verified[0] == row.rounds
        assert all(later <= earlier for earlier, later in pairwise(row.verified))
        tokens = row.tokens_per_round * row.rounds
        assert tokens == pytest.approx(round(tokens))
        assert row.mean == pytest.approx(
            sum(a * n for a, n in zip(row.by_position, row.verified, strict=True)) / sum(row.verified)
        )
    everything = real_rounds["sampled"]["all", "bf16"]
    assert everything.by_position == pytest.approx([1.0] * GAMMA, abs=1e-5)
    assert everything.tokens_per_round == GAMMA + 1
    assert real_rounds["sampled"]["streamingllm", "bf16"].tokens_per_round < GAMMA + 1


def test_greedy_rounds_accept_a_draft_or_not(real_rounds):
    for row in real_rounds["greedy"].values():
        accepted = [share * count for share, count in zip(row.by_position, row.verified, strict=True)]
        assert accepted == pytest.approx([round(count) for count in accepted])
        tokens = row.rounds + round(sum(accepted))
        assert row.tokens_per_round == pytest.approx(tokens / row.rounds)  # the next token is the target's own
        assert list(row.verified[1:]) == [round(count) for count in accepted[: len(row.verified) - 1]]


def test_an_engine_that_generates_has_the_rounds_of_the_study(tiny_folder):
    """Greedy, from the same prompt, with the plan of the same drafts: accepted and verified drafts of each position."""
    draft = StudyDraft("specextend", CHOOSING, "bf16")
    passage = Passage(TEXT, "cities", (CONTEXT,), 64)
    (row,) = study(str(tiny_folder), passage, [draft], "cpu", verification="greedy")
    plan = Plan(
        Workload(tiny_folder.name, "h200", CONTEXT, 64), speculation=Speculation(GAMMA, selection=draft.selection)
    )
    engine = load(plan, str(tiny_folder), device="cpu")
    prompt = prompt_batch(engine.tokenizer, CONTEXT, 1, TEXT)
    rounds = [len(gained[0]) for gained in engine.stream_batch(prompt, 64)]
    counted = rounds[2:-1]  # without the token of prefill, the first round and the last
    assert (row.rounds, row.tokens_per_round) == (len(counted), sum(counted) / len(counted))


def test_hindsight_is_left_out_of_real_rounds(tiny_folder):
    question = [StudyDraft(name, CHOOSING, "bf16") for name in ("hindsight", "streamingllm")]
    with pytest.warns(UserWarning, match="not measured: hindsight, which only teacher-forced rounds can know"):
        rows = list(study(str(tiny_folder), Passage(TEXT, "cities", (CONTEXT,), 24), question, "cpu"))
    assert [row.draft.policy for row in rows] == ["streamingllm"]


def test_files_of_all_accepted_drafts_stay_readable_and_are_not_resumed_by_real_rounds(tmp_path):
    """Files from before rounds were real say nothing of them, and all of their drafts count as accepted."""
    path = Path(drafts_module.__file__).parents[1] / "results" / "study_drafts_smollm2.json"
    saved = SavedStudy.read(path)
    assert (saved.verification, saved.passages) == ("teacher-forced", 1)
    assert all(row.verified == () and len(row.by_position) == GAMMA for row in saved.rows)
    real = SavedStudy(saved.model, saved.tokens, saved.calibration, "sampled", device=saved.device, text=saved.text)
    with pytest.raises(WorkloadError, match="its verification is 'teacher-forced'; allowed: 'sampled'"):
        real.resumed(path)


def test_real_rounds_make_rows_of_positions_with_enough_drafts():
    counts = RoundCounts(90, (90, 40, 31), (45.0, 32.0, 27.9), 200)
    row = StudyRow.of(StudyDraft("quest", 0.1, "bf16"), 100, counts)
    saved = SavedStudy("SmolLM2-135M", 64, "", "sampled", text="novel").with_row(row)
    rows = acceptance_rows(saved, load_shape("SmolLM2-135M"), "")
    assert [(row.position, row.acceptance, row.tokens) for row in rows] == [(1, 0.5, 90), (2, 0.8, 40)]
    greedy = replace(saved, verification="greedy")
    with pytest.raises(WorkloadError, match="verification is greedy; allowed for rows of acceptance: sampled"):
        acceptance_rows(greedy, load_shape("SmolLM2-135M"), "")


def test_a_retrieval_head_drafts_too(tiny_folder, tmp_path):
    embedding = load_tensor(tiny_folder, "model.embed_tokens.weight")
    shape = load_shape(str(tiny_folder))
    sizes = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    config = HeadConfig(model="tiny", hidden=shape.hidden, vocab=shape.vocab, context=2048, **sizes)
    generator = torch.Generator().manual_seed(3)
    widths = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    q, k = (torch.randn(width, shape.hidden, generator=generator) for width in widths)
    save_head(tmp_path / "head", Head(config, HeadWeights(torch.ones(shape.hidden), q, k, probe=probe_of(embedding))))
    passage = Passage(TEXT, "cities", (CONTEXT,), 24)
    question = [StudyDraft("retrieval-head", ratio, "bf16") for ratio in (0.999, CHOOSING)]
    for verification in ("teacher-forced", "sampled"):
        rows = study(str(tiny_folder), passage, question, "cpu", verification=verification, head=str(tmp_path / "head"))
        everything, some = rows
        assert everything.mean == pytest.approx(1.0, abs=2e-3)
        assert 0 < some.mean < everything.mean
    with pytest.raises(WorkloadError, match="by a retrieval head and none was given"):
        next(study(str(tiny_folder), passage, question, "cpu"))
