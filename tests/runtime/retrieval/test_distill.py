"""Distillation: the loss and its gradients, resumed runs, and a head that the model's engine takes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.retrieval.distill import Distillation, Training, attention_loss, distill, student_logits
from ridgeplan.runtime.retrieval.head import Rotary, load_head, save_head
from ridgeplan.runtime.retrieval.student import (
    Teacher,
    distant_tokens,
    make_student,
    pruned,
    query_projection,
    trained_parameters,
)

CPU = torch.device("cpu")
NONE = torch.arange(0)  # no queries whose attention is asked for
SMALL = Training(steps=6, tokens=160, batch=2, rate=1e-2, warmup=2)


@pytest.fixture(scope="module")
def ids():
    """A text that repeats, which a layer learns."""
    return torch.randint(128, (40,), generator=torch.Generator().manual_seed(1)).repeat(30).tolist()


@pytest.fixture
def make_distiller(tiny_model, ids):
    """A distillation of a tiny model."""

    def make(family="llama", training=SMALL):
        folder = tiny_model(family).folder
        hub = load_config(folder)
        config = decoder_config(hub, folder)
        state = load_state_dict(folder, config, torch.float32)
        student = make_student(hub, state, CPU, training.by_layer)
        return Distillation(Teacher(Decoder(config, CPU), state.decoder_weights(CPU)), student, ids, training)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_teacher_is_the_model(family, make_distiller, tiny_model, ids):
    tokens = torch.tensor(ids[:50])
    teacher = make_distiller(family).teacher
    with torch.no_grad():
        expected = tiny_model(family).reference(tokens[None]).logits[0]
    torch.testing.assert_close(teacher.logits(teacher.read(tokens, NONE)[0]), expected, rtol=1e-3, atol=1e-4)


def test_a_student_starts_as_the_first_layer_and_learns_nothing_but_it(make_distiller, tiny_model):
    student, reference = make_distiller("qwen2").student, tiny_model("qwen2").reference
    names = set(trained_parameters(student))
    assert all(name.startswith(("model.layers.0.", "model.norm.")) for name in names)
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= names
    for name, value in student.named_parameters():
        assert torch.equal(value, reference.get_parameter(name)), name


def test_the_loss_is_the_divergence_and_has_its_gradients(make_distiller, ids):
    """Against one KL of all logits at once, for a passage that takes several parts."""
    distiller, tokens = make_distiller(training=replace(SMALL, attention=0.0)), torch.tensor(ids[:160])
    loss = distiller._passage(tokens, NONE)
    gradients = {name: value.grad.clone() for name, value in distiller.parameters.items()}
    distiller.student.zero_grad()
    expected = distiller.teacher.logits(distiller.teacher.read(tokens, NONE)[0]).softmax(-1)
    drawn = distiller.student(tokens[None]).logits[0].softmax(-1)
    divergence = (expected * (expected / drawn).log()).sum(-1).mean()
    (divergence / SMALL.batch).backward()
    assert loss == pytest.approx(divergence.item(), rel=1e-4)
    for name, value in distiller.parameters.items():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-3, atol=1e-6)


def test_attention_that_is_taught_is_softened_and_to_distant_tokens(make_distiller, tiny_model, ids):
    """Against transformers' own attention, of which sinks, recent tokens and other queries' keys are left out."""
    distiller, tokens, queries = make_distiller(), torch.tensor(ids[:160]), torch.tensor([140, 132])
    reference = tiny_model(attn_implementation="eager").reference
    with torch.no_grad():
        layers = torch.stack(reference(tokens[None], output_attentions=True).attentions)[:, 0]
    heads = layers.unflatten(1, (2, 2)).mean(2)[:, :, 140, 4:13].sqrt()  # of a KV head; 13 is 127 before 140
    taught = distiller.teacher.read(tokens, queries)[1]
    assert taught.shape == (2, len(layers), 2, 160)
    torch.testing.assert_close(
        taught[:, :, 0, 4:13].transpose(0, 1), heads / heads.sum(-1, keepdim=True), rtol=1e-3, atol=1e-5
    )
    assert taught[:, :, 0, 13:].abs().sum() == taught[:, :, 0, :4].abs().sum() == 0
    assert taught[:, :, 1, 4].min() == 1  # 132 has one distant token


def test_the_loss_of_attention_is_a_divergence_of_the_largest_weights():
    """Two query heads of one set, and a query with two distant tokens: 0.1 and 0.3 of one head, 0.2 of the other."""
    weights = torch.full((2, 1, 134), 1e-9)
    weights[0, 0, 4:6], weights[1, 0, 4:6] = torch.tensor([0.1, 0.3]), torch.tensor([0.2, 0.1])
    weights[:, 0, 100] = 1 - weights.sum(-1)[:, 0]  # recent
    taught = torch.zeros(1, 1, 134)
    taught[..., 4:6] = 0.5
    logits = (3 + weights.log()).requires_grad_()
    loss = attention_loss(logits, taught, torch.tensor([133]))
    assert loss.item() == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6), rel=1e-4)
    loss.backward()
    # 0.1 too much of token 5, by head 0, and 0.1 too little of token 4, by head 1; each head's weights are a softmax.
    expected = torch.tensor([[-0.1 * 0.1, 0.1 * (1 - 0.3)], [-0.1 * (1 - 0.2), 0.1 * 0.1]])
    torch.testing.assert_close(logits.grad[:, 0, 4:6], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_logits_that_learn_attention_are_the_heads(family, by_layer, make_distiller, ids):
    """Against the head that the student becomes, with the weights of every query head moved."""
    distiller, tokens, queries = (
        make_distiller(family, replace(SMALL, by_layer=by_layer)),
        torch.tensor(ids[:160]),
        torch.tensor([9, 150]),
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in query_projection(distiller.student).parameters():
            value += 0.1 * torch.randn(value.shape, generator=generator)
        logits = student_logits(distiller.student, tokens, queries)
    shape = distiller.teacher.decoder.config.shape
    head = pruned(distiller.student, shape, 160).for_model(shape, distiller.teacher.weights.embedding)
    question, keys = head.project(tokens, torch.arange(160), Rotary(head.config, 160, CPU))
    heads = question[queries].unflatten(1, (shape.kv_heads, -1))
    expected = torch.einsum("qkgd,nkd->kgqn", heads, keys).flatten(0, 1) * shape.head_dim**-0.5
    assert len(logits) == (shape.kv_heads * shape.layers if by_layer else shape.q_heads)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("by_layer, language", [(False, 1.0), (True, 1.0), (False, 0.0), (True, 0.0)])
def test_a_token_that_the_teacher_always_attends_to_is_found(by_layer, language, make_distiller, ids):
    """Every layer and head attends to one token of the passage, whatever the query: training makes it the first."""
    sizes = {"steps": 80, "tokens": 160, "batch": 1, "rate": 1e-2, "warmup": 1}
    training = Training(**sizes, language=language, attention=10.0, by_layer=by_layer)
    distiller, marked = make_distiller(training=training), ids[6]
    read = Teacher.read

    def looked_at(self, tokens, queries):
        hidden, attention = read(self, tokens, queries)
        expected = (tokens == marked) & distant_tokens(queries, len(tokens))
        return hidden, (expected / expected.sum(-1, keepdim=True).clamp_min(1)).expand_as(attention)

    before = {
        name: value.clone() for name, value in distiller.student.named_parameters() if name not in distiller.parameters
    }
    distiller.teacher = SimpleNamespace(
        read=partial(looked_at, distiller.teacher), logits=distiller.teacher.logits, weights=distiller.teacher.weights
    )
    distiller.run(lambda step, loss: None)
    assert all(torch.equal(value, distiller.student.get_parameter(name)) for name, value in before.items())
    tokens, queries = torch.tensor(ids[1:161]), torch.tensor([159])
    (place,) = [at for at in range(4, 32) if tokens[at] == marked]
    with torch.no_grad():
        weights = student_logits(distiller.student, tokens, queries).softmax(-1)[:, 0]
    sets = weights.unflatten(0, (4 if by_layer else 2, -1)).amax(1)  # 2 KV heads, of 2 layers
    assert (sets[:, 4:32].argmax(-1) == place - 4).all()


def test_without_the_loss_of_next_tokens_the_head_alone_is_trained(make_distiller):
    trained = list(make_distiller(training=replace(SMALL, language=0.0)).parameters)
    assert trained == [
        f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm")
    ]


def test_the_loss_of_next_tokens_is_weighted(make_distiller, ids):
    tokens = torch.tensor(ids[:160])
    losses = [make_distiller(training=replace(SMALL, language=weight))._passage(tokens, NONE) for weight in (1.0, 2.0)]
    assert losses[1] == pytest.approx(2 * losses[0])


def test_it_learns(make_distiller):
    losses = []
    distiller = make_distiller(training=Training(steps=40, tokens=64, batch=2, rate=1e-2, warmup=2))
    distiller.run(lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("by_layer, language", [(False, 1.0), (True, 1.0), (True, 0.0)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(by_layer, language, make_distiller, tmp_path):
    training, path = replace(SMALL, by_layer=by_layer, language=language), tmp_path / "run.safetensors"
    make_distiller = partial(make_distiller, training=training)
    full = make_distiller()
    full.run(lambda step, loss: None)

    class Stop(Exception):
        pass

    def stop(step, loss):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        make_distiller().run(stop, path, every=2)
    again, steps = make_distiller(), []
    again.resume(path)
    again.run(lambda step, loss: steps.append(step), path, every=2)
    assert steps == [5, 6]
    assert again.losses == full.losses
    ended = make_distiller()
    ended.resume(path)
    assert ended.run(lambda step, loss: None) == full.losses[-1]  # the last tenth of 6 steps
    for name, value in full.parameters.items():
        assert torch.equal(value, again.parameters[name]), name
    other = make_distiller(training=Training(steps=7, tokens=160, batch=2, rate=1e-2, warmup=2))
    allowed = "it is of another run; allowed: the same model, text and options, or no checkpoint"
    with pytest.raises(ModelError, match=allowed):
        other.resume(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot resume from"):
        again.resume(path)


def test_a_checkpoint_of_another_text_or_model_is_refused(make_distiller, ids, tmp_path):
    distiller, path = make_distiller(), tmp_path / "run.safetensors"
    distiller.run(lambda step, loss: None, path)
    other_text = Distillation(distiller.teacher, make_distiller().student, ids[1:], SMALL)
    weights = replace(distiller.teacher.weights, embedding=distiller.teacher.weights.embedding.flip(0))
    other_model = Distillation(replace(distiller.teacher, weights=weights), make_distiller().student, ids, SMALL)
    for other in (other_text, other_model):
        with pytest.raises(ModelError, match="it is of another run"):
            other.resume(path)
        assert other.step == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_head_is_the_queries_and_keys_of_its_student(family, by_layer, tiny_model, ids, make_plan, tmp_path, prompts):
    """Its head chooses for the engine, whose budget of all tokens changes nothing."""
    folder, path = tiny_model(family).folder, tmp_path / "head.safetensors"
    head = distill(
        folder, lambda source: ids, replace(SMALL, by_layer=by_layer), lambda step, loss: None, device="cpu",
        checkpoint=tmp_path / "run.safetensors", every=3,
    )  # fmt: skip
    assert (head.steps, head.head.config.context, head.head.config.model) == (6, 160, Path(folder).name)
    assert math.isfinite(head.loss)
    save_head(path, head.head)
    assert torch.equal(load_head(path).weights.k, head.head.weights.k)
    assert (head.head.weights.q_bias is not None, head.head.weights.q_norm is not None) == (
        family == "qwen2", family == "qwen3",
    )  # fmt: skip
    plan = make_plan(target="retrieval-head", target_budget=200)
    few = make_plan(target="retrieval-head", target_budget=40, target_options={"recent": 8})
    dense, chosen, sparse = (
        runtime.load(plan_of_file, folder, device="cpu", retrieval_head=None if plan_of_file == make_plan() else path)
        for plan_of_file in (make_plan(), plan, few)
    )
    (prompt,) = prompts(100)
    assert chosen.generate(prompt, 30).tokens == dense.generate(prompt, 30).tokens
    assert torch.isfinite(sparse.teacher_forced_logits([prompt], [[1, 2, 3]])[0]).all()


def test_what_cannot_be_trained_is_named(tiny_model, ids, make_distiller):
    with pytest.raises(WorkloadError, match="the text has 100 tokens; allowed: 320, two passages, or more"):
        distill(tiny_model().folder, lambda source: ids[:100], SMALL, lambda step, loss: None, device="cpu")
    with pytest.raises(
        WorkloadError, match=r"attention is 0\.0 and tokens is 160; allowed for queries by layer: above 0"
    ):
        replace(SMALL, by_layer=True, attention=0.0)
    with pytest.raises(WorkloadError, match="tokens is 100; allowed for a head alone, with language 0: above 0"):
        replace(SMALL, language=0.0, tokens=100)
    with pytest.raises(WorkloadError, match="steps is 0; allowed: a whole number from 1"):
        Training(steps=0)
    broken = make_distiller(training=Training(steps=3, tokens=64, batch=1, rate=1.0, warmup=0))
    broken.student.model.norm.weight.data.fill_(torch.inf)
    with pytest.raises(WorkloadError, match="the loss is nan at step 1; allowed: a lower learning rate"):
        broken.run(lambda step, loss: None)


def test_training_warms_up_and_cools_down_to_a_tenth():
    rates = [Training(steps=101, rate=1.0, warmup=1).rate_at(step) for step in (0, 1, 51, 101)]
    assert rates == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert Training(rate=1.0, warmup=4).rate_at(1) == 0.5
