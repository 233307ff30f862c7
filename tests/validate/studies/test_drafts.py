"""The study of sparse drafts: what it measures on a tiny model, by values that follow from what a draft reads."""

import pytest

from ridgeplan.roofline.plan.policies.selections import SpecAttnWeights
from ridgeplan.runtime import WorkloadError
from ridgeplan.validate.acceptance import Passage
from ridgeplan.validate.studies.drafts import GAMMA, DraftAcceptance, StudyDraft, drafts_of, study

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
    measured = study(str(tiny_folder), passage, question, device="cpu")
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
    measured = DraftAcceptance(StudyDraft("quest", 0.1, "bf16"), 100, 3, (0.5, 0.8))
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
        rows = list(study(str(tiny_folder), Passage(TEXT, "cities", (CONTEXT,), 16), question, device="cpu"))
    assert [row.draft.ratio for row in rows] == [0.6]


def test_fewer_tokens_than_two_rounds_are_refused_before_anything_is_loaded():
    with pytest.raises(WorkloadError, match="tokens is 8; allowed: 16 or more"):
        next(study("no model", Passage(TEXT, "cities", (CONTEXT,), 8), [StudyDraft("quest", 0.6, "bf16")]))
