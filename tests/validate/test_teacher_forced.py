"""Acceptance on a text: against transformers with masks, against single steps, and where it must be 1."""

import random

import pytest
import torch
import transformers

from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.validate.acceptance import ROUND, SINKS, Draft, TeacherForced

CONTEXT, ROUNDS = 300, 3
TEXT = random.Random(0).choices(range(256), k=CONTEXT + ROUNDS * ROUND)


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return load(Plan(Workload("tiny", "cpu", CONTEXT, ROUNDS * ROUND)), str(tiny_folder), device="cpu")


def measured(engine, *drafts, draft_weights=None, context=CONTEXT):
    forced = TeacherForced(engine, draft_weights, [Draft.parse(draft) for draft in drafts])
    return forced.run(TEXT[: context + ROUNDS * ROUND], context, lambda: None)


def masked_probabilities(folder, visible):
    """Distributions [tokens, vocab] of transformers where token i attends to j if visible[i, j]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(torch.tensor([TEXT]), attention_mask=mask).logits[0].softmax(-1)


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_a_window_is_what_transformers_computes_with_a_mask(engine, tiny_folder, ratio):
    """Rows of a round see the sinks, the latest tokens and their round; all others, and the target, see everything."""
    causal = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()
    target = masked_probabilities(tiny_folder, causal)
    expected = []
    for start in range(CONTEXT, len(TEXT), ROUND):
        visible = causal.clone()
        kept = max(SINKS + 1, round(ratio * start))
        visible[start : start + ROUND, SINKS : start - (kept - SINKS)] = False
        draft = masked_probabilities(tiny_folder, visible)
        rows = slice(start, start + ROUND)
        expected.append(torch.minimum(target[rows], draft[rows]).sum(-1))
    (found,) = measured(engine, f"streamingllm:{ratio}")
    assert found.by_position == pytest.approx(torch.stack(expected).mean(0).tolist(), abs=2e-4)
    assert 0.2 < found.mean < 0.97


@torch.inference_mode()
def one_by_one(engine, draft_weights, cache):
    """Distributions of a round's drafts from steps of one token, as the speculator runs them."""
    found = []
    for ahead in range(ROUND):
        token = torch.tensor([[TEXT[CONTEXT + ahead]]])
        found.append(engine.decoder.step(draft_weights, cache, token, cache.draft_metadata(ahead))[0, 0])
    return torch.stack(found).softmax(-1)


@pytest.mark.parametrize(
    "name, draft, tolerance",
    [("quantspec-kv", "kv4", 1e-5), ("quantspec", "w4kv4", 2e-3)],  # torch's CPU kernel of 4-bit weights rounds inputs
)
def test_one_pass_over_a_round_equals_single_drafts(tiny_folder, name, draft, tolerance):
    """The first round, by steps of one token over the cache of an engine that drafts so."""
    plan = preset(name, Workload("tiny", "cpu", CONTEXT, ROUND))
    speculating = load(plan, str(tiny_folder), device="cpu")
    engine = load(Plan(plan.workload), str(tiny_folder), device="cpu", weights=speculating.weights)
    forced = TeacherForced(engine, speculating.draft_weights, [Draft(draft)])
    (found,) = forced.run(TEXT[: CONTEXT + ROUND], CONTEXT, lambda: None)

    cache = speculating.cache
    with torch.inference_mode():
        cache.reset(1)
        prefill(speculating.decoder, speculating.weights, cache, 0, torch.tensor(TEXT[:CONTEXT]))
        q = one_by_one(speculating, speculating.draft_weights, cache)
        tokens = torch.tensor([TEXT[CONTEXT : CONTEXT + ROUND]])
        p = speculating.decoder.step(speculating.weights, cache, tokens, cache.target_metadata(ROUND))[0].softmax(-1)
    assert found.by_position == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=tolerance)
    assert 0.2 < found.mean < 0.99


def test_drafts_that_read_what_the_target_reads_are_always_accepted(engine):
    same = measured(engine, "w4", draft_weights=engine.weights)
    assert same[0].by_position == pytest.approx([1.0] * ROUND, abs=1e-5)
    # Within two groups no token is quantized yet.
    short = measured(engine, "kv4", "kv8", context=200)
    assert [one.mean for one in short] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_drafts_share_a_run_and_do_not_disturb_each_other(engine):
    fitted_to = CalibrationText.of_model(engine.decoder, engine.weights)
    weights = quantized_draft(engine.decoder, engine.weights, 32, fitted_to)
    names = ("streamingllm:0.1", "w4kv4", "w4", "kv4", "kv8")
    together = measured(engine, *names, draft_weights=weights)
    assert [one.draft.name for one in together] == list(names)
    for one, name in zip(together, names, strict=True):
        (alone,) = measured(engine, name, draft_weights=weights)
        assert one.by_position == pytest.approx(alone.by_position, abs=1e-5)
    acceptance = {one.draft.name: one.mean for one in together}
    assert acceptance["kv8"] > acceptance["kv4"] > acceptance["w4kv4"]


def test_only_whole_rounds_count(engine):
    forced = TeacherForced(engine, None, [Draft("kv8")])
    rounds = []
    forced.run(TEXT[: CONTEXT + 2 * ROUND + 3], CONTEXT, lambda: rounds.append(1))
    assert len(rounds) == 2


@pytest.mark.parametrize(
    "text", ["kv3", "", "streamingllm", "streamingllm:0", "streamingllm:1", "specattn:0.1", "w4:0.5"]
)
def test_other_drafts_are_refused(text):
    with pytest.raises(WorkloadError, match=r"draft is .*; allowed: kv8, kv4, w4, w4kv4 or streamingllm:RATIO"):
        Draft.parse(text)
