"""Acceptance on a text: against transformers with masks, against single steps, and where it must be 1."""

import random

import pytest
import torch
import transformers
from tiny_families import FAMILY_SIZES

from ridgeplan.roofline.plan.plan import Plan, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.validate import acceptance as module
from ridgeplan.validate import engines
from ridgeplan.validate.acceptance import ROUND, SINKS, Draft, Passage, TeacherForced, measure_acceptance
from ridgeplan.validate.prompts import PromptError

CONTEXT, ROUNDS = 300, 3
TEXT = random.Random(0).choices(range(256), k=CONTEXT + ROUNDS * ROUND)


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return engine_of(tiny_folder)


def engine_of(folder, context=CONTEXT):
    plan = Plan(Workload("tiny", "cpu", context, ROUNDS * ROUND), speculation=Speculation(ROUND))
    return load(plan, str(folder), device="cpu")


def measured(engine, *drafts, draft_weights=None, context=CONTEXT):
    forced = TeacherForced(engine, draft_weights, [Draft.parse(draft) for draft in drafts])
    return forced.run(TEXT[: context + ROUNDS * ROUND], context, lambda done: None)


def masked_probabilities(folder, visible):
    """Distributions [tokens, vocab] of transformers where token i attends to j if visible[i, j], of all or by type."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    by_type = visible if isinstance(visible, dict) else {"": visible}
    masks = {kind: torch.where(each, 0.0, torch.finfo(torch.float32).min)[None, None] for kind, each in by_type.items()}
    with torch.inference_mode():
        return model(torch.tensor([TEXT]), attention_mask=masks.get("", masks)).logits[0].softmax(-1)


WINDOW = 45
WINDOWS = {
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory):
    """Factory of folders of tiny random models of a family, if it has windows one of WINDOW in every other layer."""

    def make(family, **changes):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **FAMILY_SIZES.get(family, {}) | WINDOWS | changes)
        folder = tmp_path_factory.mktemp(family)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_an_int8_cache_changes_little_beyond_a_sliding_window(family, family_folder):
    """Beyond WINDOW and beyond the groups of 128 that stay in full precision, also where rounds cross a group."""
    engine = engine_of(family_folder(family), 365)
    drafts = [Draft("kv8"), Draft("kv4")]
    text = random.Random(1).choices(range(256), k=365 + ROUNDS * ROUND)
    kv8, kv4 = TeacherForced(engine, None, drafts).run(text, 365, lambda done: None)
    assert 0.98 < kv8.mean < 1 and 0.8 < kv4.mean < kv8.mean


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_streaming_drafts_keep_sliding_windows_as_transformers_with_a_mask(ratio, family_folder):
    """Layers that see all read the sinks and the latest tokens; layers with a window read it."""
    folder = family_folder("gemma3_text")
    causal = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()
    sliding = causal & ~causal.tril(-WINDOW)
    target = masked_probabilities(folder, {"full_attention": causal, "sliding_attention": sliding})
    expected = []
    for start in range(CONTEXT, len(TEXT), ROUND):
        visible, rows = causal.clone(), slice(start, start + ROUND)
        visible[rows, SINKS : start - (max(SINKS + 1, round(ratio * start)) - SINKS)] = False
        draft = masked_probabilities(folder, {"full_attention": visible, "sliding_attention": sliding})
        expected.append(torch.minimum(target[rows], draft[rows]).sum(-1))
    (streaming,) = measured(engine_of(folder), f"streamingllm:{ratio}")
    assert streaming.by_position == pytest.approx(torch.stack(expected).mean(0).tolist(), abs=2e-4)
    assert 0.2 < streaming.mean < 0.97


@pytest.mark.parametrize(
    ("family", "layer", "message"),
    [
        ("gpt_oss", "sliding", "streamingllm:0.07 of .* cannot execute selections of tokens for attention sinks"),
        ("deepseek_v2", "full", "streamingllm:0.07 of .* 'streamingllm' among latent rows; allowed: kv8,w4kv4"),
        ("qwen3_next", "linear", "the model has recurrent states"),
    ],
)
def test_drafts_that_no_plan_has_are_refused_before_loading(family, layer, message, family_folder, monkeypatch):
    folder = family_folder(family, layer_types=[f"{layer}_attention", "full_attention"])
    monkeypatch.setattr(engines, "load", lambda *_, **__: pytest.fail("it was loaded"))
    drafts = [Draft("kv8"), Draft("streamingllm", 0.07), Draft("w4kv4")]
    with pytest.raises(WorkloadError, match=message) as error:
        list(measure_acceptance(str(folder), Passage(FOX_TEXT, "foxes", (260,), 16), drafts, "cpu"))
    assert "\n" not in str(error.value)


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
    (measured_row,) = measured(engine, f"streamingllm:{ratio}")
    assert measured_row.by_position == pytest.approx(torch.stack(expected).mean(0).tolist(), abs=2e-4)
    assert 0.2 < measured_row.mean < 0.97


@torch.inference_mode()
def one_by_one(engine, draft_weights, cache):
    """Distributions of a round's drafts from steps of one token, as the speculator runs them."""
    results = []
    for ahead in range(ROUND):
        token = torch.tensor([[TEXT[CONTEXT + ahead]]])
        results.append(
            engine.decoder.step(draft_weights, cache, token, AttentionMetadataBuilder(cache).draft_metadata(ahead))[
                0, 0
            ]
        )
    return torch.stack(results).softmax(-1)


@pytest.mark.parametrize(
    "name, draft, tolerance",
    [("quantspec-kv", "kv4", 1e-5), ("quantspec", "w4kv4", 2e-3)],  # torch's CPU kernel of 4-bit weights rounds inputs
)
def test_one_pass_over_a_round_equals_single_drafts(tiny_folder, name, draft, tolerance):
    """The first round, by steps of one token over the cache of an engine that drafts so."""
    plan = preset(name, Workload("tiny", "cpu", CONTEXT, ROUND))
    speculating = load(plan, str(tiny_folder), device="cpu")
    target = Plan(plan.workload, speculation=Speculation(ROUND))
    engine = load(target, str(tiny_folder), device="cpu", weights=speculating.weights)
    forced = TeacherForced(engine, speculating.draft_weights, [Draft(draft)])
    (run,) = forced.run(TEXT[: CONTEXT + ROUND], CONTEXT, lambda done: None)

    cache = speculating.cache
    with torch.inference_mode():
        cache.reset(1)
        prefill(speculating.decoder, speculating.weights, cache, 0, torch.tensor(TEXT[:CONTEXT]))
        q = one_by_one(speculating, speculating.draft_weights, cache)
        tokens = torch.tensor([TEXT[CONTEXT : CONTEXT + ROUND]])
        p = speculating.decoder.step(
            speculating.weights, cache, tokens, AttentionMetadataBuilder(cache).target_metadata(ROUND)
        )[0].softmax(-1)
    assert run.by_position == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=tolerance)
    assert 0.2 < run.mean < 0.99


def test_drafts_that_read_what_the_target_reads_are_always_accepted(engine):
    same = measured(engine, "w4", draft_weights=engine.weights)
    assert same[0].by_position == pytest.approx([1.0] * ROUND, abs=1e-5)
    # Within two groups no token is quantized yet.
    short = measured(engine, "kv4", "kv8", context=200)
    assert [row.mean for row in short] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_drafts_share_a_run_and_do_not_disturb_each_other(engine):
    fitted_to = CalibrationText.of_model(engine.decoder, engine.weights)
    weights = quantized_draft(engine.decoder, engine.weights, 32, fitted_to)
    names = ("streamingllm:0.1", "w4kv4", "w4", "kv4", "kv8")
    together = measured(engine, *names, draft_weights=weights)
    assert [row.draft.name for row in together] == list(names)
    for row, name in zip(together, names, strict=True):
        (single,) = measured(engine, name, draft_weights=weights)
        assert row.by_position == pytest.approx(single.by_position, abs=1e-5)
    acceptance = {row.draft.name: row.mean for row in together}
    assert acceptance["kv8"] > acceptance["kv4"] > acceptance["w4kv4"]


def test_only_whole_rounds_count(engine):
    forced = TeacherForced(engine, None, [Draft("kv8")])
    rounds = []
    forced.run(TEXT[: CONTEXT + 2 * ROUND + 3], CONTEXT, rounds.append)
    assert len(rounds) == 2


@pytest.mark.parametrize(
    "text", ["kv3", "", "streamingllm", "streamingllm:0", "streamingllm:1", "specattn:0.1", "w4:0.5"]
)
def test_other_drafts_are_refused(text):
    with pytest.raises(WorkloadError, match=r"draft is .*; allowed: kv8, kv4, w4, w4kv4 or streamingllm:RATIO"):
        Draft.parse(text)


# Rows measured on a text: what they say, and that a model is loaded and quantized once.

FOX_TEXT = "The quick brown fox jumps over the lazy dog. " * 40
DRAFTS = [Draft("w4"), Draft("streamingllm", 0.25)]


def rows(folder, contexts=(260,), tokens=16, text=FOX_TEXT, **options):
    return list(measure_acceptance(str(folder), Passage(text, "foxes", contexts, tokens, **options), DRAFTS, "cpu"))


def test_rows_say_what_was_measured(tiny_folder):
    weights, window = (row.row for row in rows(tiny_folder))
    assert (weights.draft, weights.context, weights.gamma, weights.tokens) == ("w4", 260, 8, 16)
    assert (weights.source, weights.text, weights.dtype, weights.quantizer) == (
        "measured",
        "foxes",
        "float32",
        "diagonal",
    )
    assert (window.draft, window.ratio, window.model) == ("streamingllm", 0.25, tiny_folder.name)
    assert "16 tokens of foxes" in weights.where
    assert weights.checkpoint == ""
    assert len(weights.date) == 10


def test_a_row_is_the_mean_of_its_positions(tiny_folder):
    for row in rows(tiny_folder):
        assert row.row.acceptance == pytest.approx(sum(row.by_position) / 8)


def test_weights_fitted_to_a_text_are_gptqs(tiny_folder):
    values = rows(tiny_folder, calibration=list(FOX_TEXT[:1000].encode()))
    assert values[0].row.quantizer == "gptq"


def test_a_model_is_loaded_and_quantized_once_for_all_contexts(tiny_folder, monkeypatch):
    results = []
    for place, name in ((engines, "load"), (module, "quantized_draft")):
        original = getattr(place, name)

        def counted(*arguments, original=original, name=name, **named):
            results.append((name, named.get("weights") is not None))
            return original(*arguments, **named)

        monkeypatch.setattr(place, name, counted)
    values = rows(tiny_folder, (260, 280, 300))
    assert [value.row.context for value in values] == [260, 260, 280, 280, 300, 300]
    assert results == [("load", False), ("quantized_draft", False), ("load", True), ("load", True)]


def test_progress_counts_the_rounds_of_all_contexts(tiny_folder):
    seen = []
    passage = Passage(FOX_TEXT, "foxes", (260, 300), 16)
    list(measure_acceptance(str(tiny_folder), passage, DRAFTS[1:], "cpu", lambda *what: seen.append(what)))
    assert [done for _, done, _ in seen] == [0, 1, 2, 2, 3, 4]
    assert {total for *_, total in seen} == {4}


@pytest.mark.parametrize(
    "contexts, tokens, message",
    [
        ((260,), 12, "tokens is 12; allowed: a multiple of 8"),
        ((260,), 0, "tokens is 0; allowed"),
        ((0,), 16, "context is 0"),
        ((16384,), 16, "16384 [+] 16 tokens are beyond the model's limit of 16384"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused_before_loading(
    tiny_folder, monkeypatch, contexts, tokens, message
):
    monkeypatch.setattr(engines, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(PlanError, match=message):
        rows(tiny_folder, contexts, tokens)


def test_yarn_reaches_beyond_the_limit(tiny_folder):
    plan = next(Passage(FOX_TEXT, "foxes", (16384,), 16, yarn=True).plans(module.load_shape(str(tiny_folder))))
    assert plan.workload.yarn_factor == 1.5


def test_a_text_that_is_too_short_is_refused(tiny_folder):
    with pytest.raises(PromptError, match="the text has 45 tokens; needed: 276"):
        rows(tiny_folder, text=FOX_TEXT[:45])
