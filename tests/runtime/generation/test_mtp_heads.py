"""Layers for multi-token prediction as draft heads: greedy output is the target's, proposals are the layer's own."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from grids import pairs
from safetensors.torch import load_file, save_file
from scipy import stats

from ridgeplan import runtime
from ridgeplan.roofline.execution import RoundShape
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind
from ridgeplan.runtime import ModelError
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.request import Request
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.mtp_head import APART, APART_NAMES, BEHIND_NAMES, load_head

VOCAB, NEW = 16, 70
HEAD = Drafter(DrafterKind.HEAD, depth=3)
FAMILIES = ("qwen3_5_text", "glm4_moe")
CONFIG_KEYS = {"qwen3_5_text": "mtp_num_hidden_layers", "glm4_moe": "num_nextn_predict_layers"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


class Layer(torch.nn.Module):
    """An MTP layer over transformers' model: a copy of its last layer, and of its last norm three times."""

    def __init__(self, reference):
        super().__init__()
        torch.manual_seed(2)
        self.fc = torch.nn.Linear(2 * reference.config.hidden_size, reference.config.hidden_size, bias=False)
        self.norms = torch.nn.ModuleList(copy.deepcopy(reference.model.norm) for _ in range(3))
        self.layer = copy.deepcopy(reference.model.layers[-1])

    def forward(self, reference, tokens):
        """Logits [n, vocab] of the tokens after tokens [1 .. n + 1], from the features of the first n."""
        inner, embedding_norm, hidden_norm, norm = reference.model, *self.norms
        with torch.no_grad():
            features = reference(tokens[None, :-1], output_hidden_states=True).hidden_states[-1]  # after the last norm
        embedded = inner.embed_tokens(tokens[None, 1:])
        stream = self.fc(torch.cat([embedding_norm(embedded), hidden_norm(features)], dim=-1))
        positions = torch.arange(len(tokens) - 1)[None]
        mask = torch.full((len(tokens) - 1,) * 2, float("-inf")).triu(1)[None, None]
        rotary = inner.rotary_emb(stream, positions)
        out = self.layer(stream, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return reference.lm_head(norm(out[0] if isinstance(out, tuple) else out))[0]

    def tensors(self, family, layers):
        """By the names of a family's checkpoints, after so many layers of the model."""
        qwen = family == "qwen3_5_text"
        prefix = "mtp.layers.0." if qwen else f"model.layers.{layers}."
        start, parts = (APART, APART_NAMES) if qwen else (prefix, BEHIND_NAMES)
        fc, *norms = (start + name for name in parts)
        named = {prefix + name: x for name, x in self.layer.state_dict().items()} | {f"{fc}.weight": self.fc.weight}
        return named | {f"{name}.weight": norm.weight for name, norm in zip(norms, self.norms, strict=True)}


@pytest.fixture(scope="module")
def model(family, tiny_model, tmp_path_factory):
    """A tiny model with an MTP layer in its checkpoint, trained for a few steps on what the model writes."""
    plain = tiny_model(family, agreeable=True, vocab_size=VOCAB)
    folder, reference = tmp_path_factory.mktemp("with_mtp"), plain.reference
    layer = Layer(reference)
    start = torch.randint(VOCAB, (8, 4), generator=torch.Generator().manual_seed(3))
    texts = reference.generate(start, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    optimizer = torch.optim.Adam(layer.parameters(), 3e-3)
    for step in range(48):
        text = texts[step % len(texts)]
        torch.nn.functional.cross_entropy(layer(reference, text[:-1]), text[2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(plain.folder, folder, dirs_exist_ok=True)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    extra = {name: x.detach().clone() for name, x in layer.tensors(family, config["num_hidden_layers"]).items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {CONFIG_KEYS[family]: 1}))
    return str(folder), reference, layer


@pytest.mark.parametrize("kv, passes, batch", pairs([("bf16", 0), ("int4x2", 0), ("int4x2", 2)], [3, 1], always=0))
def test_greedy_output_is_the_targets(kv, passes, batch, model, make_plan, prompts):
    folder, *_ = model
    ids = prompts(25, 2, 40, vocab=VOCAB)[:batch]
    expected = runtime.load(make_plan(kv, batch=batch), folder).generate(ids, NEW).tokens
    drafter = Drafter(DrafterKind.HEAD, 3, passes, window=24 * (passes > 0))
    plan = make_plan(kv, 6 if passes else 3, batch=batch, drafter=drafter, drafter_head=folder)
    engine = runtime.load(plan, folder)
    assert engine.generate(ids, 9).tokens == [tokens[:9] for tokens in expected]
    drafted = engine.generate(ids, NEW)  # forgets the first generation
    assert drafted.tokens == expected
    assert drafted.statistics.hit_rate == 1 and drafted.statistics.proposal_acceptance > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0, 2], ids=["target", "cascade"])
def test_sampled_output_has_the_distribution_of_plain_decoding(passes, model, make_plan, prompts):
    """Triples of tokens that 600 rows draw with drafts and without, as two samples of one distribution."""
    (folder, *_), (prompt,), rows = model, prompts(30, vocab=VOCAB), 600
    drafter = Drafter(DrafterKind.HEAD, 2, passes)
    options = {"batch": rows, "drafter": drafter, "drafter_head": folder} | ({"draft_bits": 4} if passes else {})
    plans = make_plan(batch=rows), make_plan("bf16", 4 if passes else 2, **options)
    counts = torch.zeros(2, VOCAB**3)
    for index, plan in enumerate(plans):
        sampling = SamplingParams(temperature=1.3, top_k=9, seed=7 + index)
        generation = runtime.load(plan, folder).generate([prompt] * rows, 3, sampling)
        triples = torch.tensor(generation.tokens) @ torch.tensor([VOCAB**2, VOCAB, 1])
        counts[index] = torch.bincount(triples, minlength=VOCAB**3)
    assert 0.05 < generation.statistics.acceptance < 1 and 0.05 < generation.statistics.proposal_acceptance < 1
    rare = counts.sum(0) < 10
    table = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1)
    assert table.shape[1] > 10
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


def test_proposals_are_those_of_transformers_layer(model, make_plan, prompts):
    """The first proposal after a prompt, and after each of three rounds, by transformers' layer over the whole text."""
    folder, reference, layer = model
    (text,) = prompts(40, vocab=VOCAB)
    engine = runtime.load(make_plan("bf16", 3, drafter=HEAD, drafter_head=folder), folder)
    cache = engine.cache
    speculator = engine._speculator(cache, SamplingParams())
    cache.reset(1)
    tokens = torch.tensor(text)
    with torch.inference_mode():
        pending = engine._prefill(Request.build(tokens, 8, None), [(engine, speculator)]).argmax(-1)
        cache.limit(60)
        for _ in range(4):
            drafts = speculator.draft(pending, RoundShape(3, 0, 3))
            known = torch.cat([tokens, pending])
            assert drafts.tokens[0, 0] == layer(reference, known)[-1].argmax()
            verified = speculator.verify(pending, drafts)
            tokens = torch.cat([known, verified.result.tokens[0, : verified.result.advance[0] - 1]])
            pending, _ = speculator.keep(pending, verified, cache.active())


def test_layers_that_are_not_executed_are_refused_in_one_line(family, model, tmp_path):
    folder, *_ = model
    target = decoder_config(load_config(folder), folder, 1.0)
    keys = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(Path(folder) / "model.safetensors")

    def refused(words, change_keys=(), missing=""):
        (tmp_path / "config.json").write_text(json.dumps(keys | dict(change_keys)))
        kept = {name: x for name, x in tensors.items() if not missing or missing not in name}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words) as error:
            load_head(tmp_path, target)
        assert "\n" not in str(error.value)

    refused("has 2 layers; allowed: 1 layer", {CONFIG_KEYS[family]: 2})
    refused("it lacks .*norm", missing="hnorm" if family in FAMILIES[1:] else "pre_fc_norm_hidden")


def test_latent_layers_are_refused(tiny_model, tmp_path):
    folder = tiny_model("deepseek_v3").folder
    keys = json.loads((Path(folder) / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ModelError, match="its multi-token prediction has latent attention; allowed: 1 layer with keys"):
        load_head(tmp_path, decoder_config(load_config(folder), folder, 1.0))


@pytest.mark.gpu
def test_graphs_generate_what_plain_decoding_does(model, make_plan, prompts):
    folder, *_ = model
    options, ids = {"device": "cuda", "dtype": torch.float32}, prompts(25, 2, 40, vocab=VOCAB)
    expected = runtime.load(make_plan("int4x2", batch=3), folder, **options).generate(ids, 100).tokens
    engine = runtime.load(make_plan("int4x2", 3, batch=3, drafter=HEAD, drafter_head=folder), folder, **options)
    for _ in range(2):
        assert engine.generate(ids, 100).tokens == expected
