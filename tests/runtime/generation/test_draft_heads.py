"""Draft heads: greedy output is the target's own, whatever they propose. Sampled output: test_distribution.py."""

import json
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeplan import runtime
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.execution import RoundShape
from ridgeplan.roofline.memory import fuse_params, head_step_params
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Plan
from ridgeplan.runtime import ModelError, WorkloadError
from ridgeplan.runtime.request import Request
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.draft_head import DraftHead, HeadCheckpoint
from ridgeplan.runtime.speculation.train_head import HeadTraining, Student, head_keys, lesson

VOCAB = 16
NEW = 70  # with groups of 32: two flushes
TO_TARGET = Drafter(DrafterKind.HEAD, depth=4)
CASCADE = Drafter(DrafterKind.HEAD, depth=3, passes=2, window=24)


@pytest.fixture(scope="module")
def model(tiny_model):
    """Of few tokens, so that a head which hardly learned anything agrees now and then."""
    return tiny_model(agreeable=True, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def ids(prompts):
    """Ragged prompts, one shorter than what a round adds."""
    return prompts(25, 2, 40, vocab=VOCAB)


@pytest.fixture(scope="module")
def plain(model, make_plan, ids):
    return {
        kv: runtime.load(make_plan(kv, batch=3), model.folder).generate(ids, NEW).tokens for kv in ("bf16", "int4x2")
    }


@pytest.mark.parametrize(
    "kv, gamma, drafter, options, batch",
    [
        ("bf16", 4, TO_TARGET, {}, 3),
        ("int4x2", 6, CASCADE, {"draft_bits": 4}, 3),
        ("int4x2", 4, Drafter(DrafterKind.HEAD, 4, window=24), {}, 1),
    ],
    ids=["target", "cascade", "one with a window"],
)
def test_greedy_output_is_the_targets(kv, gamma, drafter, options, batch, model, draft_head, make_plan, ids, plain):
    plan = make_plan(kv, gamma, batch=batch, drafter=drafter, drafter_head=draft_head(model), **options)
    engine = runtime.load(plan, model.folder)
    for _ in range(2):  # the second generation forgets the first
        drafted = engine.generate(ids[:batch], NEW)
        assert drafted.tokens == plain[kv][:batch]
    figures = drafted.statistics
    assert figures.hit_rate == 1
    assert figures.proposal_acceptance > 0.05
    assert figures.tokens_per_round > 1.05
    assert not drafter.cascades or figures.drafts_per_pass > 1.05


def test_tiers_may_change_from_round_to_round(model, draft_head, make_plan, ids, plain, monkeypatch):
    plan = make_plan("int4x2", 6, batch=3, drafter=CASCADE, drafter_head=draft_head(model))
    engine = runtime.load(plan, model.folder)
    order = cycle([RoundShape(6, 2, 3), 0, 0, RoundShape(2, 0, 2), 3, RoundShape(3, 1, 3), 0, 0, 0, 0, 0, 0, 0, 0])
    schedule = SimpleNamespace(next=lambda: next(order), add=lambda kind, rows: None)
    monkeypatch.setattr(engine, "_schedule", lambda request: schedule)
    generation = engine.generate(ids, NEW)
    assert generation.tokens == plain["int4x2"]
    assert 0 < generation.statistics.hit_rate < 1  # rounds that use no proposals have none


def test_a_head_drafts_as_it_was_trained(model, draft_head, make_plan, shape_of, ids):
    """Before every round, its proposals are the choices of training's unrolled steps at the end of the text."""
    folder = draft_head(model)
    plan = make_plan("bf16", 4, drafter=TO_TARGET, drafter_head=folder)
    engine = runtime.load(plan, model.folder)
    text, cache = torch.tensor(ids[2]), engine.cache
    checkpoint = HeadCheckpoint.load(folder, shape_of(model.folder))
    speculator = engine._speculator(cache, SamplingParams())
    cache.reset(1)
    steps: list[torch.Tensor] = []

    class Recorded(Student):
        def _step(self, *arguments):
            features, logits = super()._step(*arguments)
            steps.append(logits)
            return features, logits

    student = Recorded(checkpoint.config, checkpoint.tensors, engine.weights.embedding, 0)
    with torch.inference_mode():
        pending = engine._prefill(Request.build(text, 8, None), [(engine, speculator)]).argmax(-1)
        cache.limit(60)
        for kind in (RoundShape(4, 0, 4), 0, 0, RoundShape(2, 0, 2), RoundShape(4, 0, 4), RoundShape(3, 0, 3)):
            drafts = speculator.draft(pending, kind)
            tokens = torch.cat([text, pending, drafts.tokens[0]])
            taught = lesson(engine.decoder, engine.weights, checkpoint.config.depths, checkpoint.targets, tokens)
            steps.clear()
            student.loss(taught, drafts.tokens.shape[1])
            for ahead, logits in enumerate(steps):
                best = checkpoint.targets[logits[len(text) - 1 + ahead].argmax()]
                assert best == drafts.tokens[0, ahead]
            verified = speculator.verify(pending, drafts)
            text = torch.cat([text, pending, verified.result.tokens[0, : verified.result.advance[0] - 1]])
            pending, _ = speculator.keep(pending, verified, cache.active())
    assert len(text) > 45


def test_a_head_has_the_weights_that_the_cost_model_reads(model, draft_head, shape_of):
    shape, checkpoint = shape_of(model.folder), HeadCheckpoint.load(draft_head(model), shape_of(model.folder))
    head = DraftHead.of(checkpoint, torch.zeros(shape.vocab, shape.hidden))
    (layer,) = head.weights.layers
    step = sum(part.weight.numel() for part in (*layer.projections, head.weights.head))
    assert step == head_step_params(shape, checkpoint.config.draft_vocab)
    assert head.fc.weight.numel() == fuse_params(shape)


@pytest.mark.parametrize(("window", "longest"), [(0, 512), (512, 512), (128, 131_072)])
def test_a_heads_longest_sequence_is_that_of_its_training_unless_its_window_is_shorter(window, longest):
    training = HeadTraining(steps=1, tokens=512, window=window)
    keys = head_keys(load_shape("meta-llama/Llama-3.1-8B"), training, 5e5, 1e-5)
    assert keys["max_position_embeddings"] == longest


def test_another_heads_files_are_refused_in_one_line(model, draft_head, shape_of, make_plan, tmp_path):
    folder, shape = Path(draft_head(model)), shape_of(model.folder)
    keys, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def refused(words, change_keys=(), change_tensors=()):
        (tmp_path / "config.json").write_text(json.dumps(keys | dict(change_keys)))
        save_file({name: x for name, x in {**tensors, **dict(change_tensors)}.items() if x is not None},
                  tmp_path / "model.safetensors")  # fmt: skip
        with pytest.raises(ModelError, match=words) as error:
            HeadCheckpoint.load(tmp_path, shape)
        assert "\n" not in str(error.value)

    refused("hidden_size is 32; allowed for a head of .*: 64", {"hidden_size": 32})
    refused("num_hidden_layers is 2; allowed .*: 1", {"num_hidden_layers": 2})
    refused("norm_before_fc is True; allowed .*: False", {"norm_before_fc": True})
    other = {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}
    refused(r"layer_ids are \[2, 3, 9\]; allowed: 3 of the layers", {"eagle_config": other})
    refused("it lacks fc.weight", (), {"fc.weight": None})
    refused("hidden_act is 'gelu'", {"hidden_act": "gelu"})
    refused("the unknown tensor 'midlayer.self_attn.q_", (), {"midlayer.self_attn.q_norm.weight": torch.ones(32)})
    refused("it lacks fc_norm.0.weight", {"fc_norm": True})
    refused("d2t maps draft tokens outside 0 to 15, or two to one", (), {"d2t": torch.zeros_like(tensors["d2t"]) - 1})
    refused("lm_head.weight is .*allowed: floating numbers", {"draft_vocab_size": 5})
    with pytest.raises(ModelError, match="cannot load the draft head"):
        HeadCheckpoint.load(tmp_path / "nowhere", shape)
    plan = make_plan("bf16", 4, drafter=TO_TARGET)
    with pytest.raises(WorkloadError, match="none was given; allowed: a folder"):
        runtime.load(plan, model.folder)
    named = make_plan("bf16", 4, drafter=TO_TARGET, drafter_head=str(folder))
    assert Plan.from_json(named.to_json()) == named and "drafter_head" not in plan.to_dict()["workload"]


@pytest.mark.parametrize("nested", [False, True], ids=["SGLang", "speculators"])
@pytest.mark.parametrize("changes", [{"norm_output": True, "fc_norm": True}, {"norm_before_residual": True}])
def test_variants_of_eagle_draft_exactly(changes, nested, model, draft_head, make_plan, ids, plain, tmp_path):
    """EAGLE-3.1's norms, names with the prefixes that other tools write, and a layer's configuration apart."""
    folder = Path(draft_head(model))
    keys, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    named = {f"model.{name}".replace("midlayer", "layers.0"): x for name, x in tensors.items() if name != "t2d"}
    named |= {f"model.fc_norm.{index}.weight": torch.ones(64) for index in range(3) if "fc_norm" in changes}
    named["d2t"] = named.pop("model.d2t")
    if nested:
        ids_of_layers = [index + 1 for index in keys.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]]
        whole = {"draft_vocab_size": keys.pop("draft_vocab_size"), "eagle_aux_hidden_state_layer_ids": ids_of_layers}
        keys = {"speculators_model_type": "eagle3", "transformer_layer_config": keys, **whole}
        named["verifier_norm.weight"] = torch.ones(64)
    (tmp_path / "config.json").write_text(json.dumps(keys | changes))
    save_file(named, tmp_path / "model.safetensors")
    assert head_settings(str(tmp_path)).draft_vocab == len(tensors["d2t"])
    engine = runtime.load(make_plan(gamma=4, batch=3, drafter=TO_TARGET, drafter_head=str(tmp_path)), model.folder)
    assert engine.generate(ids, 24).tokens == [row[:24] for row in plain["bf16"]]


@pytest.mark.gpu
@pytest.mark.parametrize("drafter, gamma", [(TO_TARGET, 4), (CASCADE, 6)], ids=["target", "cascade"])
def test_graphs_generate_what_plain_decoding_does(drafter, gamma, model, draft_head, make_plan, ids):
    options = {"device": "cuda", "dtype": torch.float32}
    reference = runtime.load(make_plan("int4x2", batch=3), model.folder, **options).generate(ids, 100)
    plan = make_plan("int4x2", gamma, batch=3, drafter=drafter, drafter_head=draft_head(model))
    engine = runtime.load(plan, model.folder, **options)
    for _ in range(2):
        drafted = engine.generate(ids, 100)
        assert drafted.tokens == reference.tokens
        assert drafted.statistics.proposal_acceptance > 0.05
